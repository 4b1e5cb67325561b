"""The moment a job comes into being: asked again while the outcome is unknown, and never broken off half way."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from jobs.ledger import Intake
from jobs.records import Accepted, ChunkPlan, NewJob
from serving.errors import DependencyDown

T = TypeVar("T")
_PAUSES_S = (0.2, 1.0)


class Acceptance:
    """One call of the ledger's ``accept``, repeated after DependencyDown: it may have done its work all the same."""

    def __init__(self, ledger: Intake, job: NewJob, chunks: Sequence[ChunkPlan]) -> None:
        self._ledger, self._job, self._chunks = ledger, job, chunks
        self.may_own_input = False
        """Whether the input belongs to a job, or may: then it is not to be deleted."""

    async def accept(self) -> Accepted:
        """Return the job; raises what the ledger says, and DependencyDown where its answer stays out."""
        self.may_own_input = True
        try:
            accepted = await self._ask()
        except DependencyDown:
            raise  # the sweeper finds out what became of the upload
        except Exception:
            self.may_own_input = False
            raise
        self.may_own_input = accepted.job.id == self._job.id
        return accepted

    async def _ask(self) -> Accepted:
        for pause_s in _PAUSES_S:
            try:
                return await self._ledger.accept(self._job, self._chunks)
            except DependencyDown:
                await asyncio.sleep(pause_s)
        return await self._ledger.accept(self._job, self._chunks)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await what must not stop half way: a cancelled caller still waits for its end, and is cancelled then.

    The work has deadlines of its own.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the caller who would have got it is gone
        raise cancelled
    return task.result()
