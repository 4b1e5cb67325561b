"""What a micro-batch costs by its shape: a few shapes timed when a version gets ready, the others interpolated. Pure."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

Shape = tuple[int, int]
"""Rows, and the padded length of each in tokens."""

# Few enough to be timed within a second or two of a version's first rows; the longest matter least, because few rows fit.
ROWS = (1, 8, 32)
LENGTHS = (16, 64, 256)


def shapes_to_time(max_rows: int, max_tokens: int, max_padded: int) -> list[Shape]:
    """Return the shapes worth timing under the bounds of a micro-batch, the cheapest first."""
    rows = sorted({min(count, max_rows) for count in ROWS})
    lengths = sorted({min(length, max_tokens) for length in LENGTHS})
    shapes = [(count, length) for count in rows for length in lengths if count == 1 or count * length <= max_padded]
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))


class CostTable:
    """Milliseconds of any shape, from those of some; between them linear in rows and in length.

    Where a shape was not timed its cost is that of a smaller one, grown in proportion: too much rather than too little.
    """

    def __init__(self, timed_ms: Mapping[Shape, float]) -> None:
        """``timed_ms`` holds at least one shape."""
        self._rows = sorted({rows for rows, _ in timed_ms})
        self._lengths = sorted({length for _, length in timed_ms})
        self._ms = [[_at(timed_ms, rows, length) for length in self._lengths] for rows in self._rows]

    def ms(self, rows: int, length: int) -> float:
        """Return what a micro-batch of ``rows`` rows, each padded to ``length`` tokens, costs at the model."""
        by_length = [_line(self._lengths, row, length) for row in self._ms]
        return _line(self._rows, by_length, rows)

    def __iter__(self) -> Iterator[tuple[Shape, float]]:
        """Yield every point of the table, for the log."""
        for rows, costs in zip(self._rows, self._ms, strict=True):
            for length, ms in zip(self._lengths, costs, strict=True):
                yield (rows, length), ms


def _at(timed_ms: Mapping[Shape, float], rows: int, length: int) -> float:
    """Return the cost of one point of the grid."""
    if (rows, length) in timed_ms:
        return timed_ms[rows, length]
    smaller = [(r * n, ms) for (r, n), ms in timed_ms.items() if r <= rows and n <= length]
    size, ms = max(smaller, default=min((r * n, ms) for (r, n), ms in timed_ms.items()))
    return ms * max(1.0, rows * length / size)


def _line(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Return the value at a place, on the line between its neighbours; beyond the last two their line goes on."""
    if len(places) == 1:
        return values[0] * max(1.0, at / places[0])
    right = min(max(1, bisect_left(places, at)), len(places) - 1)
    left = right - 1
    slope = max(0.0, values[right] - values[left]) / (places[right] - places[left])
    return max(0.0, values[left] + slope * (at - places[left]))
