"""The job door: claims chunks while there is room, works on each by a task of its own, and gives back what is not done."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

import structlog

from batch_consumer.chunk import Chunk
from batch_consumer.chunk_work import ChunkParts, ChunkWork
from batch_consumer.leases import Leases
from batch_consumer.pace import Backoff
from batch_consumer.transitions import log_beginning
from batch_consumer.waiting import happens
from jobs.records import Claim
from serving.crashpoint import crashpoint
from serving.errors import DependencyDown
from serving.registry import Registry

log = structlog.get_logger(__name__)

CHUNKS_PER_JOB = 4
# Chunks that rest hold nothing but their claims. Those of one job must not keep all others away.
RESTING_PER_JOB = 8
RESTING = 64
LOOK_AGAIN_S = 0.01
# A ledger that does not answer forgets us and our claims by itself: the end does not wait for it for long.
GOODBYE_TIMEOUT_S = 2.0


class ChunkDoor:
    """Feeds the lane from the ledger until told to stop; the ledger or the object store going away only makes it wait."""

    def __init__(
        self, parts: ChunkParts, leases: Leases, registry: Registry, may_close: Callable[[], None] = lambda: None
    ) -> None:
        """``may_close`` is called when a chunk is done and no other of its job is held here."""
        self._parts = parts
        self._settings = parts.settings
        self._leases = leases
        self._registry = registry
        self._may_close = may_close
        self._works: dict[asyncio.Task[None], ChunkWork] = {}
        self._room = asyncio.Event()
        self._backoff = Backoff(parts.settings.retry_backoff_max_s)
        self._error: BaseException | None = None
        self._broken = Backoff(parts.settings.retry_backoff_max_s)
        self._not_before_s = 0.0
        self._dry: AbstractSet[str] = frozenset()
        """The full jobs beside which the ledger had nothing, so that it need not be asked again before a while."""
        self._dry_until_s = 0.0
        self._look_for_ends_s = 0.0
        self.progress = 0
        """Chunks done so far; the watchdog looks whether it grows."""

    @property
    def rows_in_lane(self) -> int:
        """Rows that only the lane can move on: what waits for the ledger or the object store is not among them."""
        return sum(work.chunk.missing for work in self._works.values() if work.chunk.in_lane)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``; then let running micro-batches end, give back the rest and leave."""
        beating = asyncio.create_task(self._leases.run(), name="leases")
        claiming = asyncio.create_task(self._claim_all(stop), name="claims")
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([beating, claiming, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in [beating, claiming]:
                if task.done():
                    task.result()
        finally:
            self._room.set()
            try:
                await self._drain(claiming)
            finally:
                for one in (beating, claiming, stopping):
                    one.cancel()
                await asyncio.gather(beating, claiming, stopping, return_exceptions=True)
                await self._leave()

    # -- claims -------------------------------------------------------------------------------------------------------

    async def _claim_all(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            if self._error is not None:
                raise self._error
            self._room.clear()
            if (pause_s := await self._claim_next()) and not stop.is_set():
                await happens(self._room, pause_s)

    async def _claim_next(self) -> float:
        """Claim one chunk if there is room; returns how long to wait before the next try, in seconds."""
        # Jitter, so that many consumers do not ask at the same moment.
        idle_s = self._settings.claim_interval_ms / 1000 * random.uniform(0.75, 1.25)  # noqa: S311
        models, full = self._models(), self._full_jobs()
        if not self._leases.may_claim:
            return idle_s
        if not self._has_room(models):
            # Jobs that end need no model: they must not wait for one that gives no answer.
            models = {}
            if time.monotonic() < self._look_for_ends_s or not self._has_room(models):
                return idle_s
        if (left_s := self._not_before_s - time.monotonic()) > 0:
            return left_s
        if full >= self._dry and (left_s := self._dry_until_s - time.monotonic()) > 0:
            return left_s
        try:
            claim = await self._parts.ledger.claim(self._parts.consumer, models, sorted(full), self._settings.lease_s)
        except DependencyDown as error:
            self._leases.away(error)
            return self._backoff.next_s()
        self._backoff.reset()
        if claim is None:
            if models:
                self._dry, self._dry_until_s = full, time.monotonic() + idle_s
            else:
                self._look_for_ends_s = time.monotonic() + self._settings.lease_renewal_s
            return idle_s
        crashpoint("after_claim")
        self._begin(claim)
        return 0.0

    def _models(self) -> Mapping[str, Sequence[str]]:
        """Return what this process can run now: nothing in a pause, when only jobs that end have something to do."""
        if self._parts.lane.paused:
            return {}
        ready = {
            name: [version for version in self._registry.versions(name) if self._registry.bulk_ready(name, version)]
            for name in self._registry.names
        }
        return {name: versions for name, versions in ready.items() if versions}

    def _has_room(self, models: Mapping[str, Sequence[str]]) -> bool:
        """Whether one more may be claimed. Chunks whose model is away, as all are in a pause, take up no room: others,
        and those of jobs that end, need not wait for it."""
        chunks = [work.chunk for work in self._works.values()]
        resting = sum(chunk.is_resting for chunk in chunks)
        held = sum(
            chunk.is_settled or chunk.claim.model_version in models.get(chunk.claim.model, ())
            for chunk in chunks
            if not chunk.is_resting
        )
        return held < self._settings.max_chunks and resting < RESTING

    def _full_jobs(self) -> AbstractSet[str]:
        """Return the jobs of which enough is held, so that a small job behind a giant one finds room.

        A chunk that is half answered no longer counts: the next one is there before the lane runs thin.
        """
        chunks = [work.chunk for work in self._works.values()]
        full = Counter(chunk.claim.chunk.job for chunk in chunks if chunk.is_full)
        resting = Counter(chunk.claim.chunk.job for chunk in chunks if chunk.is_resting)
        return {job for job, held in full.items() if held >= CHUNKS_PER_JOB} | {
            job for job, held in resting.items() if held >= RESTING_PER_JOB
        }

    def _begin(self, claim: Claim) -> None:
        log_beginning(claim)
        chunk = Chunk(claim, self._room.set)
        self._leases.add(chunk)
        work = ChunkWork(chunk, self._parts)
        task = asyncio.create_task(work.run(), name=f"chunk {claim.chunk.job} {claim.chunk.number}")
        self._works[task] = work
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        work = self._works.pop(task)
        if task.cancelled():
            return
        self._leases.drop(work.chunk)
        self._room.set()
        self._error = self._error or task.exception()
        if work.is_broken:
            # The error may be one of all chunks.
            self._not_before_s = time.monotonic() + self._broken.next_s()
        elif work.is_done:
            self.progress += 1
            self._broken.reset()
            job = work.chunk.claim.chunk.job
            if all(other.chunk.claim.chunk.job != job for other in self._works.values()):
                self._may_close()

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _drain(self, claiming: "asyncio.Task[None]") -> None:
        """Within the drain time: end what runs at the model, write what is answered, give back the rest."""
        deadline_s = time.monotonic() + self._settings.drain_timeout_s * 0.8
        # A claim that is being made is ours: it is given back too.
        await asyncio.wait([claiming], timeout=self._settings.drain_timeout_s * 0.2)
        for work in self._works.values():
            if not work.chunk.is_settled:
                work.chunk.stop()
        self._parts.lane.drop_dead()
        while self._has_rows_in_flight() and time.monotonic() < deadline_s:  # noqa: ASYNC110 (rows tell no event)
            await asyncio.sleep(LOOK_AGAIN_S)
        await self._cancel([task for task, work in self._works.items() if not work.chunk.is_settled], 0)
        await self._cancel(list(self._works), max(0.1, deadline_s - time.monotonic()))

    async def _cancel(self, tasks: Collection["asyncio.Task[None]"], timeout_s: float) -> None:
        """Give tasks some time, then end them and give their claims back."""
        if not tasks:
            return
        held = {task: self._works[task].chunk for task in tasks}
        await asyncio.wait(tasks, timeout=timeout_s)
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        claims = [held[task].claim for task in left if task.cancelled()]
        for task in left:
            self._leases.drop(held[task])
        if claims:
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                    await self._parts.ledger.release(claims)
                log.info("claims given back", claims=len(claims))
            except (DependencyDown, TimeoutError):
                log.warning("claims not given back: their leases run out", claims=len(claims))

    def _has_rows_in_flight(self) -> bool:
        return any(
            isinstance(row.owner, Chunk) and not row.owner.is_settled for row in self._parts.lane.rows_in_flight()
        )

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self._parts.ledger.leave(self._parts.consumer)
        except (DependencyDown, TimeoutError):
            log.info("the ledger is away: it forgets this consumer by itself")
