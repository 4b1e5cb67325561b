"""One owned partition of the jobs topic: one record after the other is submitted, then its offset is committed."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from batch_consumer.broker import Broker, Trouble
from batch_consumer.metrics import Metrics
from batch_consumer.offsets import start_of
from batch_consumer.pace import Backoff
from batch_consumer.waiting import happens
from serving.errors import DependencyDown, TwodoorError
from serving.settings import ConsumerSettings, KafkaSettings

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JobsParts:
    """What every partition of the jobs topic shares."""

    kafka: KafkaSettings
    settings: ConsumerSettings
    """Its ``group_id`` is the one of the jobs topic."""
    broker: Broker
    metrics: Metrics
    take: Callable[[Any], Awaitable[None]]
    """Bring one record to its end: a job, or a refusal. Raises where it has to be tried again."""
    committed: dict[TopicPartition, int] = field(default_factory=dict)
    """What this process committed last, by partition: it shows when Kafka forgets."""


class JobsPartition:
    """A partition from its assignment to its loss. ``run`` is the task its owner awaits.

    Nothing here fences an old owner: a record both submit is one job, by its idempotency key.
    """

    def __init__(self, partition: TopicPartition, consumer: Any, parts: JobsParts) -> None:
        self.partition = partition
        self.opening = 0
        """Grows each time the partition is opened: what was read for an earlier opening is dropped."""
        self.next_read = 0
        """The offset behind the last record read."""
        self.position = 0
        """The offset that is committed, or would be if anything had been read."""
        self.is_open = False
        self._consumer = consumer
        self._parts = parts
        self._settings = parts.settings
        self._pending: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._revoked = asyncio.Event()
        self._begin_again = False
        self._blocked = ""
        self._told = False
        self._backoff = Backoff(parts.settings.retry_backoff_max_s)

    @property
    def wants(self) -> bool:
        """Whether records may be handed in now."""
        return self.is_open and not (self._pending or self._begin_again or self._blocked)

    def give(self, messages: Sequence[Any]) -> None:
        """Take records that were read, in offset order."""
        self.next_read = messages[-1].offset + 1
        self._pending.extend(messages)
        self._changed.set()

    def begin_again(self) -> None:
        """Once what was read is done, look up anew where the partition stands."""
        self._begin_again = True
        self._changed.set()

    def block(self, reason: str) -> None:
        """Read no further until the process is started again or the partition is lost."""
        if not self._blocked:
            self._blocked = reason
            self._parts.metrics.blocked.labels(reason).inc()

    async def run(self) -> None:
        """Own the partition until ``drain`` or cancellation."""
        try:
            while not self._revoked.is_set():
                try:
                    await self._open()
                    await self._serve()
                except (DependencyDown, *Trouble) as error:
                    self._tell(error)
                await self._pause()
        finally:
            if self._blocked:
                self._parts.metrics.blocked.labels(self._blocked).dec()

    async def _open(self) -> None:
        """Look up where the partition stands, and let the reader read from there."""
        partition, timeout_s = self.partition, self._settings.kafka_timeout_s
        committed, _ = await self._parts.broker.committed(partition)
        async with asyncio.timeout(timeout_s):
            beginning = (await self._consumer.beginning_offsets([partition]))[partition]
        async with asyncio.timeout(timeout_s):
            end = (await self._consumer.end_offsets([partition]))[partition]
        if self._revoked.is_set():
            return
        start = start_of(committed, self._parts.committed.get(partition), beginning, end)
        self._consumer.seek(partition, start.position)
        if start.lost:
            self._parts.metrics.offsets_lost.inc()
            log.warning(
                "offsets lost", topic=partition.topic, partition=partition.partition, reason=start.lost,
                gap=start.gap, committed=committed, beginning=beginning, end=end, position=start.position,
            )  # fmt: skip
            self._parts.committed.pop(partition, None)
        self.next_read = self.position = start.position
        self.opening += 1
        self._begin_again = self._told = False
        self.is_open = True

    async def _serve(self) -> None:
        """Bring records to their end, in order, until the partition is lost or has to begin again."""
        try:
            while (message := await self._next()) is not None:
                if not await self._take(message):
                    return
                await self._commit(message.offset + 1)
                self._backoff.reset()
        finally:
            self.is_open = False
            self._pending.clear()

    async def _next(self) -> Any:
        while not self._pending or self._revoked.is_set():
            if self._revoked.is_set() or self._begin_again or not self.is_open:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._pending.popleft()

    async def _take(self, message: Any) -> bool:
        """Try until the record is at its end; False where the partition was lost before."""
        told = False
        while not self._revoked.is_set():
            try:
                await self._parts.take(message)
                return True
            except (TwodoorError, *Trouble) as error:
                if not told:
                    log.warning(
                        "a job waits in its topic", partition=message.partition, offset=message.offset,
                        error=type(error).__name__, reason=str(error),
                    )  # fmt: skip
                self._parts.metrics.retries.labels(error.code if isinstance(error, TwodoorError) else "kafka").inc()
            except Exception:
                # Nobody foresaw it: its partition waits for a better version, all others go on.
                if not told:
                    log.exception("a record fails", partition=message.partition, offset=message.offset)
                self._parts.metrics.retries.labels("internal_error").inc()
            told = True
            await self._pause()
        return False

    async def _commit(self, offset: int) -> None:
        offsets = {self.partition: OffsetAndMetadata(offset, "")}
        async with asyncio.timeout(self._settings.kafka_timeout_s):
            await self._consumer.commit(offsets)
        self._parts.committed[self.partition] = self.position = offset

    async def _pause(self) -> None:
        await happens(self._revoked, self._backoff.next_s())

    def _tell(self, error: Exception) -> None:
        self._parts.metrics.retries.labels("kafka").inc()
        if not self._told:
            self._told = True
            log.warning(
                "partition of jobs begins again", partition=self.partition.partition, error=type(error).__name__,
                reason=str(error),
            )  # fmt: skip

    async def drain(self, task: "asyncio.Task[None]", timeout_s: float) -> None:
        """Let the record in hand come to its end and be committed, and end ``task`` (``run``) in time."""
        self._revoked.set()
        self._changed.set()
        try:
            await asyncio.wait([task], timeout=timeout_s)
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=self._settings.kafka_timeout_s)
