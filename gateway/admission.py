"""How much the door takes on: tokens admitted, body bytes held, calls at Triton. Every bound answers, none queues without end."""

import asyncio
import time
from collections import deque

from gateway.metrics import Metrics
from serving.deadline import Deadline
from serving.errors import DeadlineExceeded, Overloaded

_WINDOW_S = 10.0
_LONGEST_RETRY_S = 30.0
_SHORTEST_RETRY_S = 1.0


class DrainRate:
    """Tokens answered per second over a sliding window; None while nothing was answered in it."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._done: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, tokens: int, now_s: float) -> None:
        """Note that this many tokens were answered."""
        second = float(int(now_s))
        if self._done and self._done[-1][0] == second:
            self._done[-1] = (second, self._done[-1][1] + tokens)
        else:
            self._done.append((second, tokens))
        self._sum += tokens
        self._forget(now_s)

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return the rate over the part of the window that has been seen."""
        self._forget(now_s)
        if not self._sum:
            return None
        return self._sum / max(1.0, now_s - self._done[0][0])

    def _forget(self, now_s: float) -> None:
        while self._done and self._done[0][0] < now_s - self._window_s:
            self._sum -= self._done.popleft()[1]


class Lease:
    """One call's tokens. They are given back when the caller and every call to Triton made for it are done."""

    def __init__(self, admission: "Admission", tokens: int) -> None:
        self._admission, self.tokens = admission, tokens
        self._holders = 1

    def shrink(self, tokens: int) -> None:
        """Give back what tokenizing has shown not to be needed."""
        if tokens < self.tokens:
            self._admission.give_back(self.tokens - tokens, answered=False)
            self.tokens = tokens

    def hold(self) -> None:
        """Keep the tokens for one holder more."""
        self._holders += 1

    def drop(self) -> None:
        """End one holder; the last one gives the tokens back."""
        self._holders -= 1
        if self._holders == 0:
            self._admission.give_back(self.tokens, answered=True)


class Admission:
    """The bound of all tokens admitted and not yet answered."""

    def __init__(self, max_tokens: int, metrics: Metrics) -> None:
        self._max_tokens, self._metrics = max_tokens, metrics
        self._rate = DrainRate()
        self._next_slot_s = 0.0
        self.tokens = 0
        metrics.watch_admission(lambda: self.tokens)

    def admit(self, tokens: int) -> Lease:
        """Reserve tokens; raises Overloaded with the time after which there should be room.

        A call larger than the whole bound is taken when nothing else is admitted: otherwise it never could be.
        """
        wanted = min(tokens, self._max_tokens)
        if self.tokens + wanted > self._max_tokens:
            self._metrics.shed.labels("tokens").inc()
            raise Overloaded("the service has as much work as it takes on", self.retry_after_s(wanted))
        self.tokens += wanted
        return Lease(self, wanted)

    def give_back(self, tokens: int, *, answered: bool) -> None:
        """Take tokens off the bound; answered ones tell the drain rate."""
        self.tokens -= tokens
        if answered and tokens:
            self._rate.add(tokens, time.monotonic())

    def retry_after_s(self, tokens: int) -> float:
        """Return when there is room for this many tokens, by the measured rate.

        Each refused call is told to come after those refused before it, so that they do not all return at once.
        """
        now_s = time.monotonic()
        rate = self._rate.tokens_per_s(now_s)
        if rate is None:
            return _SHORTEST_RETRY_S
        excess = max(0, self.tokens + tokens - self._max_tokens)
        slot_s = max(now_s + excess / rate, self._next_slot_s)
        self._next_slot_s = min(slot_s + tokens / rate, now_s + _LONGEST_RETRY_S)
        return min(max(slot_s - now_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)


class ByteBudget:
    """The bound of all request bodies held at one time."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self._max_bytes, self._metrics = max_bytes, metrics
        self.held = 0

    def take(self, count: int) -> None:
        """Count bytes in; raises Overloaded, and then has not counted them."""
        if self.held + count > self._max_bytes:
            self._metrics.shed.labels("bytes").inc()
            raise Overloaded("the service holds as many request bodies as it may")
        self.held += count

    def give_back(self, count: int) -> None:
        """Count bytes out."""
        self.held -= count


class Slot:
    """One place among the calls at Triton, and a hold on the tokens of the call it serves."""

    def __init__(self, places: asyncio.Semaphore, lease: Lease) -> None:
        self._places, self._lease = places, lease
        lease.hold()

    def release(self) -> None:
        """Free the place. Called once, when Triton is really done: also for a call whose caller left earlier."""
        self._places.release()
        self._lease.drop()


class Slots:
    """Most calls at Triton at one time; who waits for a place waits no longer than the deadline."""

    def __init__(self, count: int) -> None:
        self._places = asyncio.Semaphore(count)

    async def take(self, deadline: Deadline, lease: Lease) -> Slot:
        """Wait for a place; raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._places.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed in line") from None
        return Slot(self._places, lease)
