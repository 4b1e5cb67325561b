"""Which rows go next: the oldest waiting row, then its neighbours in length. Pure: no clock, no loop, no network."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from batch_consumer.rows import Row

# On a CPU a padded token costs as much as a real one, so a thin backlog gives a small batch rather than a padded one.
MAX_PADDING_CPU = 1.25
# On a GPU a larger batch is nearly free.
MAX_PADDING_GPU = 8.0


class Backlog:
    """The tokenized rows of one model that wait.

    Rows are kept twice, by age within their feeder and by length; a row taken through one list is skipped in the other.
    Feeders (topics, later chunks) take turns: the next batch is built around the oldest row of the feeder that has had
    the fewest rows so far.
    """

    def __init__(self) -> None:
        self._by_length: dict[int, deque[Row]] = {}
        self._lengths: list[int] = []
        self._by_age: dict[str, deque[Row]] = {}
        self._served: dict[str, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: Row) -> None:
        """Add a tokenized row behind the others of its feeder."""
        queue = self._by_age.setdefault(row.feeder, deque())
        if not queue:
            # A feeder that wakes starts level with the others: it must not make up for the time it had no rows.
            active = [self._served[name] for name, rows in self._by_age.items() if rows and name in self._served]
            self._served[row.feeder] = max(self._served.get(row.feeder, 0), min(active, default=0))
        row.waiting = True
        queue.append(row)
        if row.tokens not in self._by_length:
            self._by_length[row.tokens] = deque()
            insort(self._lengths, row.tokens)
        self._by_length[row.tokens].append(row)
        self._count += 1

    def oldest_s(self) -> float | None:
        """Return the arrival time of the oldest waiting row, on the monotonic clock."""
        heads = [row.arrived_s for row in map(self._head, list(self._by_age)) if row is not None]
        return min(heads, default=None)

    def drop_dead(self) -> None:
        """Forget the rows nobody waits for any more."""
        alive = [row for rows in self._by_age.values() for row in rows if row.waiting and row.alive]
        self._by_length.clear()
        self._lengths.clear()
        self._by_age.clear()
        self._count = 0
        for row in alive:
            self.add(row)

    def take(self, max_rows: int, max_tokens: int, max_padding: float = MAX_PADDING_CPU) -> list[Row]:
        """Remove and return the next micro-batch, empty where no row waits.

        At most ``max_rows`` rows and ``max_tokens`` padded tokens (a single row may have more), and at most
        ``max_padding`` padded tokens for each real one.
        """
        seed = self._next_seed()
        if seed is None:
            return []
        self._remove(seed)
        batch, longest, real = [seed], seed.tokens, seed.tokens
        for row in self._neighbours(seed.tokens, batch):
            top = max(longest, row.tokens)
            padded = top * (len(batch) + 1)
            if len(batch) >= max_rows or padded > max_tokens or padded > max_padding * (real + row.tokens):
                break
            self._remove(row)
            batch.append(row)
            longest, real = top, real + row.tokens
        for row in batch:
            self._served[row.feeder] += 1
        return batch

    def _next_seed(self) -> Row | None:
        heads = [(self._served[name], name, row) for name in list(self._by_age) if (row := self._head(name))]
        return min(heads, key=lambda head: head[:2])[2] if heads else None

    def _head(self, feeder: str) -> Row | None:
        queue = self._by_age[feeder]
        while queue:
            row = queue[0]
            if row.waiting and row.alive:
                return row
            if row.waiting:
                self._remove(row)
            queue.popleft()
        return None

    def _remove(self, row: Row) -> None:
        row.waiting = False
        self._count -= 1

    def _neighbours(self, tokens: int, batch: list[Row]) -> Iterator[Row]:
        """Yield waiting rows, cheapest in padding first. A longer row makes every row of the batch longer."""
        up = bisect_left(self._lengths, tokens)
        down, longest = up - 1, tokens
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
        queue = self._by_length[tokens]
        while queue:
            row = queue[0]
            if row.waiting and row.alive:
                return row
            if row.waiting:
                self._remove(row)
            queue.popleft()
        return None

    def _forget_length(self, index: int) -> None:
        del self._by_length[self._lengths[index]]
        del self._lengths[index]


def padding_ratio(rows: list[Row]) -> float:
    """Return padded tokens divided by real ones: 1.0 is no padding."""
    return max(row.tokens for row in rows) * len(rows) / max(1, sum(row.tokens for row in rows))
