"""Which rows go next: the oldest of the feeder whose turn it is, then its neighbours in length. Pure: no clock, no loop."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from batch_consumer.rows import Row
from batch_consumer.turns import Feeder, Turns

# On a CPU a padded token costs as much as a real one, so a thin backlog gives a small batch rather than a padded one.
MAX_PADDING_CPU = 1.25
# Up to here rows of the feeder whose turn it is come first, then everybody's, and only then those that need more
# padding: otherwise many small jobs would cost the model a fifth more.
NEAR_PADDING = 1.1
# On a GPU a larger batch is nearly free.
MAX_PADDING_GPU = 8.0
# On a CPU a token costs more in a larger micro-batch, which outgrows the caches, and the more so the longer its rows are;
# it is hardly cheaper in any.
MAX_TOKENS_CPU = 1_024
MAX_TOKENS_GPU = 4_096

Fits = Callable[[int, int], bool]
"""Whether a micro-batch of so many rows, each padded to so many tokens, is still short enough."""


def anything_fits(rows: int, length: int) -> bool:
    """Bound nothing."""
    return True


class Leaf:
    """The waiting rows of one feeder, kept by age and by length; a row taken through one list is skipped in the other."""

    def __init__(self) -> None:
        self._by_length: dict[int, deque[Row]] = {}
        self._lengths: list[int] = []
        self._by_age: deque[Row] = deque()
        self.count = 0

    def add(self, row: Row) -> None:
        """Add a tokenized row behind the others."""
        row.waiting = True
        self._by_age.append(row)
        if row.tokens not in self._by_length:
            self._by_length[row.tokens] = deque()
            insort(self._lengths, row.tokens)
        self._by_length[row.tokens].append(row)
        self.count += 1

    def remove(self, row: Row) -> None:
        """Take a row out; it is passed over in both lists from now on."""
        row.waiting = False
        self.count -= 1

    def oldest(self) -> Row | None:
        """Return the oldest row somebody waits for."""
        return self._head(self._by_age)

    def alive(self) -> list[Row]:
        """Return the rows somebody waits for, oldest first."""
        return [row for row in self._by_age if row.waiting and row.alive]

    def neighbours(self, longest: int, batch: list[Row]) -> Iterator[Row]:
        """Yield waiting rows, cheapest in padding first, for a batch that is ``longest`` tokens long and grows meanwhile.

        A longer row makes every row of the batch longer.
        """
        up = bisect_left(self._lengths, longest)
        down = up - 1
        while True:
            while up < len(self._lengths) and not self._first(self._lengths[up]):
                self._forget_length(up)
            while down >= 0 and not self._first(self._lengths[down]):
                self._forget_length(down)
                up, down = up - 1, down - 1
            higher = (self._lengths[up] - longest) * len(batch) if up < len(self._lengths) else None
            lower = longest - self._lengths[down] if down >= 0 else None
            if higher is None and lower is None:
                return
            if lower is None or (higher is not None and higher <= lower):
                index, longest = up, max(longest, self._lengths[up])
            else:
                index = down
            row = self._first(self._lengths[index])
            if row is None:
                return
            yield row

    def _first(self, tokens: int) -> Row | None:
        return self._head(self._by_length[tokens])

    def _head(self, queue: deque[Row]) -> Row | None:
        while queue:
            row = queue[0]
            if row.waiting and row.alive:
                return row
            if row.waiting:
                self.remove(row)
            queue.popleft()
        return None

    def _forget_length(self, index: int) -> None:
        del self._by_length[self._lengths[index]]
        del self._lengths[index]


class Backlog:
    """The tokenized rows of one model that wait, by feeder.

    Feeders take turns by rows (``turns``). A micro-batch is filled from the feeder whose turn it is, and only where that
    has not enough near neighbours from the others in the order of their turns: filled from all alike, it would follow
    who has most rows waiting. Nobody waits while there is room.
    """

    def __init__(self) -> None:
        self._leaves: dict[Feeder, Leaf] = {}
        self._turns = Turns()

    def __len__(self) -> int:
        return sum(leaf.count for leaf in self._leaves.values())

    def add(self, row: Row) -> None:
        """Add a tokenized row behind the others of its feeder."""
        leaf = self._leaves.get(row.feeder)
        if leaf is None:
            self._turns.wake(row.feeder, self._leaves)
            leaf = self._leaves[row.feeder] = Leaf()
        leaf.add(row)

    def oldest_s(self) -> float | None:
        """Return the arrival time of the oldest waiting row, on the monotonic clock."""
        heads = [row.arrived_s for leaf in self._leaves.values() if (row := leaf.oldest()) is not None]
        return min(heads, default=None)

    def drop_dead(self) -> None:
        """Forget the rows nobody waits for any more."""
        for feeder, leaf in list(self._leaves.items()):
            if alive := leaf.alive():
                self._leaves[feeder] = Leaf()
                for row in alive:
                    self._leaves[feeder].add(row)
            else:
                self._end(feeder)

    def take(
        self, max_rows: int, max_tokens: int, max_padding: float = MAX_PADDING_CPU, fits: Fits = anything_fits
    ) -> list[Row]:
        """Remove and return the next micro-batch, empty where no row waits.

        At most ``max_rows`` rows and ``max_tokens`` padded tokens, as long as it ``fits`` (a single row may have more),
        and at most ``max_padding`` padded tokens for each real one.
        """
        order = self._in_turn()
        if not order:
            return []
        self._turns.begin(order[0])
        batch: list[Row] = []
        for bound in (min(NEAR_PADDING, max_padding), max_padding):
            for feeder in order:
                leaf, before = self._leaves[feeder], len(batch)
                _fill(batch, leaf, Bounds(max_rows, max_tokens, bound, fits))
                if len(batch) > before:
                    self._turns.served(feeder, len(batch) - before)
                if len(batch) >= max_rows:
                    return batch
        return batch

    def _end(self, feeder: Feeder) -> None:
        del self._leaves[feeder]
        self._turns.sleep(feeder, self._leaves)

    def _in_turn(self) -> list[Feeder]:
        for feeder in [feeder for feeder, leaf in self._leaves.items() if leaf.oldest() is None]:
            self._end(feeder)
        self._turns.prune(self._leaves)
        return self._turns.order(self._leaves)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a micro-batch may grow to."""

    rows: int
    tokens: int
    padding: float
    fits: Fits

    def allow(self, rows: int, longest: int, real_tokens: int) -> bool:
        """Return whether so many rows, padded to the longest, are within the bounds."""
        padded = longest * rows
        within = rows <= self.rows and padded <= self.tokens and padded <= self.padding * real_tokens
        return within and self.fits(rows, longest)


def _fill(batch: list[Row], leaf: Leaf, bounds: Bounds) -> None:
    """Move rows of one feeder into the batch, an empty one around the oldest, until a bound is reached."""
    if not batch and (seed := leaf.oldest()) is not None:
        leaf.remove(seed)
        batch.append(seed)
    longest, real = max(row.tokens for row in batch), sum(row.tokens for row in batch)
    for row in leaf.neighbours(longest, batch):
        top = max(longest, row.tokens)
        if not bounds.allow(len(batch) + 1, top, real + row.tokens):
            return
        leaf.remove(row)
        batch.append(row)
        longest, real = top, real + row.tokens


def padding_ratio(rows: Sequence[Row]) -> float:
    """Return padded tokens divided by real ones: 1.0 is no padding."""
    return max(row.tokens for row in rows) * len(rows) / max(1, sum(row.tokens for row in rows))
