"""The heartbeat: one statement renews all leases of the process, brings the news of its claims, and the operator's wish."""

import asyncio
import time

import structlog

from batch_consumer.chunk import Chunk
from batch_consumer.lane import Lane
from jobs.ledger import Work
from jobs.records import ChunkId, Control, Renewal
from serving.errors import DependencyDown
from serving.settings import ConsumerSettings

log = structlog.get_logger(__name__)

# While a pause is being obeyed whoever waits for it hears of it sooner than with the next renewal.
OBEYING_INTERVAL_S = 0.2


class Leases:
    """The claims of one process. ``run`` beats also without claims, while they wait, and while the process drains."""

    def __init__(self, consumer: str, ledger: Work, lane: Lane, settings: ConsumerSettings) -> None:
        self._consumer = consumer
        self._ledger = ledger
        self._lane = lane
        self._settings = settings
        self._epoch = 0
        self._renewed_s = float("-inf")
        self._obeying = False
        self._told_away = False
        self.chunks: dict[ChunkId, Chunk] = {}
        self.is_up = False
        """Whether the ledger answered when it was asked last."""

    @property
    def may_claim(self) -> bool:
        """Whether the leases held are known to be ours. Otherwise a claim could take one of our own chunks away."""
        return self.is_up and time.monotonic() - self._renewed_s < self._settings.lease_s / 2

    def add(self, chunk: Chunk) -> None:
        """Keep a claim alive from now on."""
        former = self.chunks.get(chunk.claim.chunk)
        if former is not None:
            former.lose()
        self.chunks[chunk.claim.chunk] = chunk

    def drop(self, chunk: Chunk) -> None:
        """Forget a claim that has ended."""
        if self.chunks.get(chunk.claim.chunk) is chunk:
            del self.chunks[chunk.claim.chunk]

    async def run(self) -> None:
        """Beat until cancelled.

        The lane may begin paused: before anything runs the operator's wish is asked for, but where the ledger is away
        it is not waited for.
        """
        first = asyncio.create_task(self._beat(), name="first heartbeat")
        try:
            await asyncio.wait([first], timeout=self._settings.lease_renewal_s)
            if not self.is_up:
                self._lane.paused = False
            await first
        finally:
            first.cancel()
            await asyncio.wait([first])
        while True:
            began_s = time.monotonic()
            await self._beat()
            interval_s = self._settings.lease_renewal_s
            if self._obeying:
                interval_s = min(interval_s, OBEYING_INTERVAL_S)
            await asyncio.sleep(max(0.0, began_s + interval_s - time.monotonic()))

    async def _beat(self) -> None:
        held = dict(self.chunks)
        claims = {chunk: held[chunk].claim.generation for chunk in held}
        rows = self._lane.count_in_flight()
        asked_s = time.monotonic()
        try:
            renewal = await self._ledger.renew(self._consumer, claims, self._epoch, rows, self._settings.lease_s)
        except DependencyDown as error:
            self.away(error)
            return
        self._renewed_s = asked_s
        self._back()
        reported = self._epoch
        self._obey(renewal.control)
        self._obeying = self._lane.paused and (reported != self._epoch or rows > 0)
        self._tell(renewal, held)

    def _obey(self, control: Control) -> None:
        """Pause or resume, then take over the epoch: it is reported by the next beat, when the lane has obeyed."""
        self._lane.paused = control.paused
        self._epoch = control.epoch

    def _tell(self, renewal: Renewal, held: dict[ChunkId, Chunk]) -> None:
        for chunk in renewal.lost:
            if chunk in held:
                held[chunk].lose()
        for chunk, status in renewal.ending.items():
            if chunk in held:
                held[chunk].end(status)
        if renewal.lost or renewal.ending:
            self._lane.drop_dead()

    def away(self, error: DependencyDown) -> None:
        """The ledger did not answer: no chunk is dropped for that, and the last wish of the operator holds."""
        self.is_up = False
        if not self._told_away:
            self._told_away = True
            log.warning("ledger away", reason=str(error), claims=len(self.chunks))

    def _back(self) -> None:
        self.is_up = True
        if self._told_away:
            self._told_away = False
            log.info("ledger back", claims=len(self.chunks))
