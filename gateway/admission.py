"""How much the door takes on: rows and tokens admitted, and body bytes held. Every bound answers."""

import math
import time
from collections.abc import Callable

from gateway.metrics import Metrics
from gateway.promises import CAUTION, Amounts, DrainRate, Promises
from serving.deadline import Deadline
from serving.errors import Overloaded

BUSY_ROWS = 32
"""From so many rows on, what is answered a second is taken for what the models can do."""
# Rows and tokens a second before anything was measured: two slow cores.
_FIRST_GUESS = (100.0, 6_400.0)
# Nobody is refused for a deadline before so many seconds of work in line were seen.
_SURE_AFTER_S = 2.0
_EVERY_TWENTIETH = 0.05
# How long all bodies together take to be answered, before that was measured.
_BODIES_S = 10.0


class Lease:
    """One call's rows and tokens. They are given back when the caller and every call to Triton made for it are done."""

    def __init__(self, admission: "Admission", rows: int, tokens: int) -> None:
        self._admission, self.rows, self.tokens = admission, rows, tokens
        self._holders = 1
        self._served = True

    def shrink(self, tokens: int, rows: int | None = None) -> None:
        """Give back what tokenizing has shown not to be needed: rows that never go to a model say nothing about its speed."""
        needed_rows = self.rows if rows is None else min(rows, self.rows)
        needed = min(tokens, self.tokens)
        self._admission.shrink((self.rows, self.tokens), (needed_rows, needed))
        self.rows, self.tokens = needed_rows, needed

    def hold(self) -> None:
        """Keep the tokens for one holder more."""
        self._holders += 1

    def drop(self, *, served: bool = True) -> None:
        """End one holder; the last one gives rows and tokens back. A call that was not served says nothing about speed."""
        self._served = self._served and served
        self._holders -= 1
        if self._holders == 0:
            self._admission.give_back(self.rows, self.tokens, served=self._served)


class Admission:
    """The bounds of all rows and of all tokens admitted and not yet answered."""

    def __init__(
        self, max_tokens: int, metrics: Metrics, *, max_rows: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._metrics, self._clock = metrics, clock
        self._rate = DrainRate(2, min(BUSY_ROWS, max_rows))
        self._promises = Promises((max_rows, max_tokens))
        # Reserved before tokenizing is more than is needed after: promises are made of what is needed.
        self._needed_share = 1.0
        self.rows = self.tokens = 0
        metrics.watch_admission(lambda: self.rows, lambda: self.tokens)

    def admit(self, tokens: int, rows: int = 1, deadline: Deadline | None = None) -> Lease:
        """Reserve rows and tokens; raises Overloaded with the time after which there should be room.

        Room that was promised to callers who were refused is not given to those who come before them. A call larger
        than a whole bound is taken when nothing else is admitted: otherwise it never could be. With a deadline, a call
        that would wait in line for longer, at the measured rate, is refused at once instead of answered too late.
        """
        now_s = self._clock()
        rows, reserved = min(rows, self._max_rows), min(tokens, self._max_tokens)
        wanted = (rows, reserved * self._needed_share)
        told_to_come = self._promises.claim(wanted, now_s)
        reason = self._full(rows, reserved, deadline)
        if not reason and not told_to_come and not self._leaves_room(wanted, now_s):
            reason = "promised"
        if reason:
            self._metrics.shed.labels(reason).inc()
            raise Overloaded(_REFUSALS[reason], self._promise(wanted, deadline))
        self._take(rows, reserved, now_s)
        return Lease(self, rows, reserved)

    def shrink(self, reserved: tuple[int, int], needed: tuple[int, int]) -> None:
        """Take off the bounds what a call has reserved and does not need (rows, tokens)."""
        if reserved != needed:
            self._take(needed[0] - reserved[0], needed[1] - reserved[1], self._clock())
        if needed[1]:
            self._needed_share += (needed[1] / reserved[1] - self._needed_share) * _EVERY_TWENTIETH

    def give_back(self, rows: int, tokens: int, *, served: bool) -> None:
        """Take an ended call off the bounds; what was served tells the rate."""
        now_s = self._clock()
        if served:
            self._rate.answered((rows, tokens), now_s)
        self._take(-rows, -tokens, now_s)

    def retry_after_s(self, tokens: int, rows: int = 1) -> float:
        """Return when there should be room for a call that was taken and then refused elsewhere, and promise it."""
        return self._promise((min(rows, self._max_rows), min(tokens, self._max_tokens)), None)

    @property
    def _held(self) -> Amounts:
        return (self.rows, self.tokens)

    @property
    def _rates(self) -> Amounts:
        return self._rate.per_s() or _FIRST_GUESS

    def _full(self, rows: int, tokens: int, deadline: Deadline | None) -> str:
        """Return why a call cannot be taken now, empty when it can."""
        if self.rows + rows > self._max_rows:
            return "rows"
        if self.tokens + tokens > self._max_tokens:
            return "tokens"
        return "deadline" if deadline is not None and self.rows > self._most_ahead(deadline) else ""

    def _leaves_room(self, wanted: Amounts, now_s: float) -> bool:
        """Return whether what is promised still fits after a call. A door with little to do never turns one away for that:
        those who were promised room may have gone for good."""
        quiet = self.rows < min(BUSY_ROWS, self._max_rows // 4)
        return quiet or self._promises.leave_room(self._held, self._rates, wanted, now_s)

    def _most_ahead(self, deadline: Deadline) -> float:
        """Return how many rows may be before a call that has to begin before its deadline."""
        rates = self._rate.per_s()
        if rates is None or self._rate.busy_s < _SURE_AFTER_S:
            return math.inf
        # Not fewer than tell a rate: else a rate that was bad once would be kept up by refusing.
        return max(BUSY_ROWS, rates[0] * CAUTION * deadline.remaining_s())

    def _promise(self, wanted: Amounts, deadline: Deadline | None) -> float:
        most_ahead = math.inf if deadline is None else self._most_ahead(deadline)
        return self._promises.make(self._held, self._rates, wanted, self._clock(), most_ahead)

    def _take(self, rows: int, tokens: int, now_s: float) -> None:
        self.rows += rows
        self.tokens += tokens
        self._rate.held(self.rows, now_s)


_REFUSALS = {
    "rows": "the service has as many rows as it takes on",
    "tokens": "the service has as much work as it takes on",
    "deadline": "the work in line takes longer than the call's deadline",
    "promised": "the room there is was promised to callers who were told to come now",
}


class ByteBudget:
    """The bound of all request bodies held at one time."""

    def __init__(self, max_bytes: int, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._metrics, self._clock = max_bytes, metrics, clock
        self._rate = DrainRate(1, max_bytes / 2)
        self._promises = Promises((max_bytes,))
        self.held = 0

    def take(self, count: int) -> None:
        """Count bytes in; raises Overloaded with the time after which there should be room, and then has not counted them."""
        now_s = self._clock()
        if self.held + count > self._max_bytes:
            self._metrics.shed.labels("bytes").inc()
            rates = self._rate.per_s() or (self._max_bytes / _BODIES_S,)
            wait_s = self._promises.make((self.held,), rates, (min(count, self._max_bytes),), now_s)
            raise Overloaded("the service holds as many request bodies as it may", wait_s)
        self.held += count
        self._rate.held(self.held, now_s)

    def give_back(self, count: int) -> None:
        """Count bytes out."""
        now_s = self._clock()
        self._rate.answered((count,), now_s)
        self.held -= count
        self._rate.held(self.held, now_s)
