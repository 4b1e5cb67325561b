"""Which waiting rows go to the model together: the choice of the joiner, pure and without I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.models import ModelSpec, padded_length


@dataclass(frozen=True, slots=True)
class JoinBounds:
    """What one joined request may be. ``overhead_tokens`` is what a request costs besides its rows, in tokens."""

    rows: int
    tokens: int
    overhead_tokens: int

    @property
    def window_rows(self) -> int:
        """How many waiting rows, the longest waiting first, a request is chosen from.

        More of them would fit each other better, and let those wait longer that fit nobody.
        """
        return 4 * self.rows


def neighbours(spec: ModelSpec, lengths: Sequence[int], bounds: JoinBounds) -> list[int]:
    """Return which rows of the window go together: the first one, and those whose company makes it the cheapest.

    Rows are joined from the first one's length outwards, and the request is cut where a token of text costs the least:
    its padded tokens and what the request costs besides, divided by the tokens that are no padding.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    low = order.index(0)
    high = low + 1
    first = lengths[0]
    sent = first
    best, best_cost = (low, high), (bounds.overhead_tokens + padded_length(spec, (first,))) / first
    while high - low < min(bounds.rows, len(order)):
        below = lengths[order[low - 1]] if low else None
        above = lengths[order[high]] if high < len(order) else None
        if above is None or (below is not None and first - below <= above - first):
            low -= 1
            sent += lengths[order[low]]
        else:
            high += 1
            sent += above
        longest = lengths[order[high - 1]]
        padded = (high - low) * padded_length(spec, (longest, longest))
        if padded > bounds.tokens:
            break
        cost = (bounds.overhead_tokens + padded) / sent
        if cost < best_cost:
            best, best_cost = (low, high), cost
    return order[best[0] : best[1]]
