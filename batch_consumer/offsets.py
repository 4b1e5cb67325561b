"""Where to begin in a partition, and whether the place Kafka remembers still exists. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """The first offset to read. ``lost`` says how the committed offset got lost, or is empty; ``gap`` by how much."""

    position: int
    lost: str = ""
    gap: int = 0


def start_of(committed: int | None, known: int | None, beginning: int, end: int) -> Start:
    """Return where to begin.

    ``committed`` is what the group's coordinator remembers, ``known`` what this process committed last, ``beginning``
    and ``end`` the offsets that exist. Never the end: records that came meanwhile are work, not history.
    """
    if committed is None:
        if known is not None:
            return Start(beginning, "the committed offset was deleted, as happens when the topic is", abs(end - known))
        return Start(beginning)
    if committed > end:
        return Start(beginning, "the committed offset is behind the end: the topic was made anew", committed - end)
    if committed < beginning:
        return Start(beginning, "records were deleted before they were read", beginning - committed)
    return Start(committed)
