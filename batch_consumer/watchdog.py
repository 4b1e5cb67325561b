"""The watchdog: lag, a model that is ready, and no progress for too long means that something is stuck."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sight:
    """What the watchdog sees in one look."""

    progress: int
    """A count that grows with every row answered and every record committed."""
    lag: int | None
    """Records not yet committed; None while Kafka does not tell."""
    waits: bool
    """Whether rows wait for a model or a server that is away: that is no stall."""
    reads_nothing: bool = False
    """Whether the Kafka consumer has given nothing for a long time although there is something to read."""


class Watchdog:
    """Judges a row of sights. ``stalled`` is what /healthz shows."""

    def __init__(self, stall_timeout_s: float, now_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._progress = -1
        self._moved_at_s = now_s
        self.stalled = False

    def look(self, sight: Sight, now_s: float) -> bool:
        """Take one sight at ``now_s`` (monotonic seconds); returns whether the process is stalled."""
        if sight.progress != self._progress or not sight.lag or sight.waits:
            self._progress = sight.progress
            self._moved_at_s = now_s
        stalled = now_s - self._moved_at_s >= self._stall_timeout_s
        if stalled and not self.stalled:
            log.error("stalled", lag=sight.lag, no_progress_for_s=round(now_s - self._moved_at_s, 1))
        self.stalled = stalled
        return stalled


async def watch(watchdog: Watchdog, see: Callable[[], Sight], restart: Callable[[], None], interval_s: float) -> None:
    """Look again and again until cancelled; a consumer that reads nothing is replaced before the stall is declared."""
    while True:
        sight = see()
        watchdog.look(sight, time.monotonic())
        if sight.reads_nothing:
            log.warning("the Kafka consumer gives no records: a new one is made", lag=sight.lag)
            restart()
        await asyncio.sleep(interval_s)
