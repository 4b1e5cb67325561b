"""A job's result as one long text made of its parts: how long it is, and the bytes of any range of it.

Nothing is copied or joined beforehand: a download reads ranges of the parts, in row order.
"""

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from jobs.objects import Objects
from jobs.records import Part

_RANGE = re.compile(r"bytes=[ \t]*(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})[ \t]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start`` to ``end`` (exclusive) of a text."""

    start: int
    end: int

    def header(self, total_bytes: int) -> str:
        """Return the value of Content-Range."""
        return f"bytes {self.start}-{self.end - 1}/{total_bytes}"


class Unsatisfiable:
    """The answer to a range that names no byte of the text: 416, with ``Content-Range: bytes */total``."""

    def header(self, total_bytes: int) -> str:
        """Return the value of Content-Range."""
        return f"bytes */{total_bytes}"


@dataclass(frozen=True, slots=True)
class ResultPlan:
    """The result of a job, or only its error lines, as ranges of objects in row order."""

    ranges: Sequence[tuple[str, int, int]]
    """(key, start, end) of each part that is not empty."""
    total_bytes: int

    def stream(self, objects: Objects, wanted: ByteRange | None = None) -> AsyncGenerator[bytes, None]:
        """Return the bytes of a range (None: all) in order, reading a bounded number of pieces ahead.

        Close it (``contextlib.aclosing``) where it is not read to its end. Raises ObjectMissing where the job was
        deleted meanwhile, and DependencyDown.
        """
        return objects.stream_ranges(self.ranges if wanted is None else _clip(self.ranges, wanted))


def plan_results(parts: Sequence[Part], only_errors: bool = False) -> ResultPlan:
    """Return the plan over parts in row order: all result lines, or the error lines, which stand behind them."""
    ranges = [
        (part.key, part.result_bytes, part.result_bytes + part.error_bytes)
        if only_errors
        else (part.key, 0, part.result_bytes)
        for part in parts
    ]
    ranges = [(key, start, end) for key, start, end in ranges if end > start]
    return ResultPlan(ranges, sum(end - start for _, start, end in ranges))


def parse_range(header: str | None, total_bytes: int) -> ByteRange | Unsatisfiable | None:
    """Return what a Range header asks for; None where it is to be ignored: absent, not one range of bytes, nonsense."""
    match = _RANGE.fullmatch(header.strip()) if header is not None else None
    if match is None or not (match["first"] or match["last"]):
        return None
    if not match["first"]:
        start, end = max(0, total_bytes - int(match["last"])), total_bytes
    else:
        start, end = int(match["first"]), total_bytes
        if match["last"]:
            if int(match["last"]) < start:
                return None
            end = min(total_bytes, int(match["last"]) + 1)
    return ByteRange(start, end) if start < end else Unsatisfiable()


def _clip(ranges: Sequence[tuple[str, int, int]], wanted: ByteRange) -> Sequence[tuple[str, int, int]]:
    clipped = []
    position = 0
    for key, start, end in ranges:
        first = max(start, start + wanted.start - position)
        last = min(end, start + wanted.end - position)
        if first < last:
            clipped.append((key, first, last))
        position += end - start
    return clipped
