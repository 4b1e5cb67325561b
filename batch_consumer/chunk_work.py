"""What is done with one claimed chunk: read its rows, let the lane answer them, write the part, tell the ledger."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from batch_consumer.chunk import Chunk, ClaimLostError
from batch_consumer.chunk_rows import ChunkRow, parse_rows, rows_too_large, rows_unread
from batch_consumer.lane import Lane
from batch_consumer.metrics import UNKNOWN, Metrics
from batch_consumer.pace import Backoff, rest_s
from batch_consumer.parts import ResultPart, render_part
from batch_consumer.transitions import log_transition, open_status
from batch_consumer.waiting import happens
from jobs.ledger import Ledger, part_key
from jobs.objects import ObjectMissing, Objects
from jobs.states import Status
from serving.crashpoint import crashpoint
from serving.errors import DependencyDown, InputLost
from serving.settings import ConsumerSettings

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LOST = "the job's input object is no longer there"


@dataclass(frozen=True, slots=True)
class ChunkParts:
    """What every chunk shares."""

    consumer: str
    """Id of this process in the ledger."""
    ledger: Ledger
    objects: Objects
    lane: Lane
    settings: ConsumerSettings
    metrics: Metrics
    known_models: Callable[[], frozenset[str]]


class ChunkWork:
    """The work on one chunk. ``run`` is the task its owner awaits; cancelling it leaves the claim to be released."""

    def __init__(self, chunk: Chunk, parts: ChunkParts) -> None:
        self.chunk = chunk
        self.is_done = False
        self.is_broken = False
        """Whether an error nobody foresaw ended it."""
        self._parts = parts
        self._backoff = Backoff(parts.settings.retry_backoff_max_s)

    async def run(self) -> None:
        """Work until the chunk is done or lost."""
        chunk, end = self.chunk, "given back"
        try:
            await self._rest()
            await self._answer()
            await self._write()
            self.is_done, end = True, "done"
        except ClaimLostError:
            end = "lost"
            self._parts.metrics.leases_lost.inc()
        except Exception:
            # It waits for a better version, by longer and longer rests, and all others go on.
            log.exception("a chunk fails", job=chunk.claim.chunk.job, chunk=chunk.claim.chunk.number)
            self._parts.metrics.retries.labels("internal_error").inc()
            self.is_broken, end = True, "broken"
            await self._give_back()
        finally:
            log.debug(
                "claim ended",
                job=chunk.claim.chunk.job,
                chunk=chunk.claim.chunk.number,
                rows=chunk.claim.plan.row_count,
                seconds=round(time.monotonic() - chunk.claimed_s, 3),
                end=end,
            )

    async def _rest(self) -> None:
        """Let a chunk that was claimed very often wait, unless its job ends: then its rows need no model."""
        chunk = self.chunk
        end_s = time.monotonic() + rest_s(chunk.claim.generation)
        while (left_s := end_s - time.monotonic()) > 0 and not chunk.is_settled:
            if not chunk.is_resting:
                chunk.is_resting = True
                log.warning(
                    "a chunk rests", job=chunk.claim.chunk.job, chunk=chunk.claim.chunk.number,
                    claims=chunk.claim.generation, seconds=round(left_s, 1),
                )  # fmt: skip
            chunk.changed.clear()
            self._check()
            await happens(chunk.changed, left_s)
        chunk.is_resting = False

    async def _give_back(self) -> None:
        self.chunk.stop()
        with suppress(DependencyDown):  # then its lease runs out
            await self._parts.ledger.release([self.chunk.claim])

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _answer(self) -> None:
        chunk = self.chunk
        rows = chunk.load(await self._read())
        self._parts.lane.submit(rows)
        while not chunk.is_settled:
            chunk.changed.clear()
            self._check()
            if chunk.remember:
                await self._remember()
            else:
                await chunk.changed.wait()
        self._check()

    async def _read(self) -> Sequence[ChunkRow]:
        """Read the chunk's bytes and parse them; where they are gone for good the job begins to fail."""
        claim = self.chunk.claim
        plan, has_lines = claim.plan, claim.has_lines
        if plan.oversized:
            return rows_too_large(plan, has_lines)
        try:
            data = await self._persist(
                lambda: self._parts.objects.get_range(claim.input_key, plan.start_byte, plan.end_byte)
            )
            if len(data) > self._parts.settings.offload_bytes:
                return await asyncio.to_thread(parse_rows, data, plan, has_lines)
            return parse_rows(data, plan, has_lines)
        except (ObjectMissing, InputLost):
            await self._input_lost()
            return rows_unread(plan, has_lines)

    async def _input_lost(self) -> None:
        chunk, job = self.chunk, self.chunk.claim.chunk.job
        if chunk.ending is None:
            failing = await self._persist(lambda: self._parts.ledger.fail(job, InputLost.code, _LOST))
            if failing is not None:
                log_transition(failing, open_status(failing))
            chunk.end(Status.FAILING, _LOST)

    async def _remember(self) -> None:
        """Tell the ledger of the suspects at once; with the ledger away, again after a while."""
        chunk = self.chunk
        chunk.remember = False
        try:
            if not await self._parts.ledger.remember(chunk.claim, dict(chunk.suspects)):
                chunk.lose()
        except DependencyDown:
            chunk.remember = True
            await self._pause()

    # -- the part -----------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Put the part, then compare-and-set the chunk to done; whoever loses removes its part."""
        chunk, claim, ledger = self.chunk, self.chunk.claim, self._parts.ledger
        outcomes = chunk.freeze()
        part = await asyncio.to_thread(render_part, chunk.rows, outcomes, claim.plan.first_row)
        key = part_key(claim)
        try:
            await self._persist(lambda: self._parts.objects.put(key, part.data))
            crashpoint("after_part_put")
            self._check()
        except ClaimLostError:
            await self._discard(key)
            raise
        chunk.is_completing = True
        done = part.done(key)
        completed = await self._persist(lambda: ledger.complete(claim, done))
        crashpoint("after_complete")
        if not completed:
            await self._discard(key)
            raise ClaimLostError
        self._count(part)

    async def _discard(self, key: str) -> None:
        try:
            await self._parts.objects.delete([key])
        except DependencyDown:
            log.info("a lost claim's part is left to the sweeper", key=key)

    def _count(self, part: ResultPart) -> None:
        known = self.chunk.claim.model in self._parts.known_models()
        model = self.chunk.claim.model if known else UNKNOWN
        for end, rows in part.ends.items():
            self._parts.metrics.rows.labels("bulk", model, end).inc(rows)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer, for as long as the claim is ours; raises ClaimLostError.

        A store that is away uses up nothing: the answers are kept, and the leases renewed as soon as that works again.
        """
        self._backoff.reset()
        while True:
            self._check()
            try:
                return await call()
            except DependencyDown:
                await self._pause()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.next_s()):
                await self._until_lost()

    async def _until_lost(self) -> None:
        while not self.chunk.is_lost:
            self.chunk.changed.clear()
            await self.chunk.changed.wait()

    def _check(self) -> None:
        if self.chunk.is_lost:
            raise ClaimLostError
