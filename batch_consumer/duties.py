"""Runs duties again and again, one after the other, each failing on its own."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from batch_consumer.pace import Backoff
from batch_consumer.waiting import happens
from serving.errors import DependencyDown

log = structlog.get_logger(__name__)

# A duty with much to do gives way to its neighbours after this many pages.
MAX_PAGES = 20
# However often a duty is hastened, it runs no more often than this.
HASTE_GAP_S = 0.2

Work = Callable[[], Awaitable[bool]]
"""Does one page of a duty; returns whether there may be more."""


class Duty:
    """One kind of work and when it is due next."""

    def __init__(self, name: str, work: Work, every_s: float, backoff_max_s: float) -> None:
        self.name = name
        self.work = work
        self.every_s = every_s
        self.backoff = Backoff(backoff_max_s)
        self.due_at_s = 0.0
        """On the monotonic clock."""
        self.began_at_s = -HASTE_GAP_S
        self.is_broken = False
        """Whether it failed last time in a way nobody foresaw; that is logged once."""


class Rounds:
    """A loop over a few duties that use the same parts."""

    def __init__(self, name: str, duties: Sequence[Duty]) -> None:
        self.name = name
        self._duties = duties
        self._wake = asyncio.Event()
        self._waiting: set[str] = set()

    def wake(self) -> None:
        """Look now whether there is something to do."""
        self._wake.set()

    def hasten(self, name: str) -> None:
        """Make a duty due now or very soon, unless it waits for a part that is away."""
        for duty in self._duties:
            if duty.name == name and name not in self._waiting:
                duty.due_at_s = min(duty.due_at_s, duty.began_at_s + HASTE_GAP_S)
                self.wake()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``; the page that runs then is finished."""
        while not stop.is_set():
            self._wake.clear()
            for duty in self._duties:
                if not stop.is_set() and duty.due_at_s <= time.monotonic():
                    await self._do(duty, stop)
            pause_s = min(duty.due_at_s for duty in self._duties) - time.monotonic()
            # Also where nothing is to wait for: the rest of the process gets its turn.
            await happens(self._wake, max(0.001, pause_s))

    async def _do(self, duty: Duty, stop: asyncio.Event) -> None:
        duty.began_at_s = time.monotonic()
        duty.due_at_s = duty.began_at_s + duty.every_s * random.uniform(0.8, 1.2)  # noqa: S311 (jitter, no secret)
        try:
            pages = 0
            while await duty.work():
                pages += 1
                if pages == MAX_PAGES:
                    duty.due_at_s = 0.0
                if pages == MAX_PAGES or stop.is_set():
                    break
        except DependencyDown as error:
            self._wait_for(duty, error)
        except Exception:
            # Whatever is wrong with one duty: the others are still done, and this one is tried again.
            if not duty.is_broken:
                log.exception("a duty failed", duty=duty.name)
            duty.is_broken = True
            duty.due_at_s = time.monotonic() + max(duty.every_s, duty.backoff.next_s())
        else:
            self._goes_on(duty)

    def _wait_for(self, duty: Duty, error: DependencyDown) -> None:
        """Back off; what several duties miss at one time is told once."""
        if not self._waiting:
            log.warning("duties wait", duties=self.name, reason=str(error))
        self._waiting.add(duty.name)
        duty.due_at_s = time.monotonic() + max(duty.every_s, duty.backoff.next_s())

    def _goes_on(self, duty: Duty) -> None:
        duty.backoff.reset()
        duty.is_broken = False
        if duty.name in self._waiting:
            self._waiting.discard(duty.name)
            if not self._waiting:
                log.info("duties go on", duties=self.name)
