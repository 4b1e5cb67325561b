"""``Prefer: wait=N``: an answer that waits for a job's end. The ledger is asked at a modest pace, by a bounded number."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from jobs.records import Job

MOST_WAITERS = 256
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_GROWTH = 1.5


class Waiters:
    """Those who wait now. One too many is answered at once: a server may leave a preference aside (RFC 7240)."""

    def __init__(self, most: int = MOST_WAITERS) -> None:
        self._most = most
        self._waiting = 0
        self._stopping = False

    @property
    def full(self) -> bool:
        """Whether no more may wait."""
        return self._waiting >= self._most

    def stop(self) -> None:
        """Let all who wait, and who come later, have their answer at the next look: the process is about to end."""
        self._stopping = True

    async def until_ended(self, get: Callable[[], Awaitable[Job]], wait_s: float) -> Job:
        """Return the job as soon as it has ended, or as it is when the time is over; raises what ``get`` raises."""
        end_s = time.monotonic() + wait_s
        pause_s = _FIRST_PAUSE_S
        self._waiting += 1
        try:
            while True:
                job = await get()
                left_s = end_s - time.monotonic()
                if job.status.ended or left_s <= 0 or self._stopping:
                    return job
                await asyncio.sleep(min(pause_s, left_s))
                pause_s = min(pause_s * _GROWTH, _LONGEST_PAUSE_S)
        finally:
            self._waiting -= 1
