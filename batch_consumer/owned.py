"""One owned partition: fence the old owner, begin at the committed offset, commit what is finished, begin again on trouble."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import ProducerFenced

from batch_consumer.broker import Broker, Trouble
from batch_consumer.facts import TopicFacts
from batch_consumer.lane import Lane
from batch_consumer.metrics import Metrics
from batch_consumer.offsets import Start, start_of
from batch_consumer.pace import Backoff
from batch_consumer.partition import Record, Window, read_suspects, write_suspects
from batch_consumer.results import count, outgoing
from batch_consumer.transactions import PartitionProducer
from batch_consumer.waiting import happens
from serving.crashpoint import crashpoint
from serving.errors import DependencyDown
from serving.settings import ConsumerSettings, KafkaSettings

log = structlog.get_logger(__name__)

IDLE_S = 1.0
LOOK_AGAIN_S = 0.01


@dataclass(slots=True)
class Progress:
    """How many records were committed; the watchdog looks whether it grows."""

    records: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """What every partition shares."""

    kafka: KafkaSettings
    settings: ConsumerSettings
    broker: Broker
    facts: TopicFacts
    lane: Lane
    metrics: Metrics
    known_models: Callable[[], frozenset[str]]
    committed: dict[TopicPartition, int] = field(default_factory=dict)
    """What this process committed last, by partition: it shows when Kafka forgets."""
    progress: Progress = field(default_factory=Progress)


class OwnedPartition:
    """A partition from its assignment to its loss. ``run`` is the task its owner awaits."""

    def __init__(self, partition: TopicPartition, consumer: Any, parts: Parts) -> None:
        self.partition = partition
        self.window: Window | None = None
        self.blocked = ""
        """Why nothing more is read until an operator acts, or empty."""
        self._consumer = consumer
        self._parts = parts
        self._settings = parts.settings
        self._revoked = False
        self._flush = False
        self._begin_again = False
        self._told = False
        self._backoff = Backoff(parts.settings.retry_backoff_max_s)

    @property
    def room(self) -> int:
        """How many records may be read now."""
        if self.window is None or self._begin_again or self.blocked:
            return 0
        return self.window.room

    @property
    def is_open(self) -> bool:
        """Whether records of this partition are being read and worked on."""
        return self.window is not None

    def begin_again(self) -> None:
        """Read no further; once all that was read is committed, look up anew where the partition stands."""
        self._begin_again = True
        if self.window is not None:
            self.window.changed.set()

    def block(self, reason: str) -> None:
        """Read no further until the process is started again."""
        if not self.blocked:
            self.blocked = reason
            self._parts.metrics.blocked.labels(reason).inc()

    async def run(self) -> None:
        """Own the partition until ``drain`` or cancellation."""
        try:
            while not self._revoked:
                try:
                    await self._own_once()
                    if not self._revoked:
                        # It began again by itself. What keeps it from reading may last, such as a batch that is broken.
                        await asyncio.sleep(self._backoff.next_s())
                except ProducerFenced:
                    # Whoever fenced us owns the partition now, or we have just not heard that we lost it.
                    self._parts.metrics.fenced.inc()
                    log.warning("fenced", partition=self.partition.partition)
                    await asyncio.sleep(self._settings.session_timeout_ms / 3000)
                except (DependencyDown, *Trouble) as error:
                    self._tell(error)
                    await asyncio.sleep(self._backoff.next_s())
        finally:
            if self.blocked:
                self._parts.metrics.blocked.labels(self.blocked).dec()

    def _tell(self, error: Exception) -> None:
        """Count a failure; log the first of a row of them, since every partition tries again and again."""
        self._parts.metrics.retries.labels("kafka").inc()
        if not self._told:
            self._told = True
            log.warning(
                "partition begins again",
                partition=self.partition.partition,
                error=type(error).__name__,
                reason=str(error),
            )

    async def _own_once(self) -> None:
        facts = self._parts.facts
        most_bytes = min(facts.results.max_message_bytes, facts.dead_letters.max_message_bytes)
        producer = PartitionProducer(self._parts.kafka, self._settings, self.partition, most_bytes)
        await producer.start()
        try:
            window = await self._open()
            if window is not None:
                await self._serve(window, producer)
        finally:
            if self.window is not None:
                self.window.close()
                self.window = None
                self._parts.lane.drop_dead()
            await producer.close()

    async def _open(self) -> Window | None:
        """Look up where the partition stands, now that nobody else can commit; None where it was lost meanwhile."""
        partition, timeout_s = self.partition, self._settings.kafka_timeout_s
        await self._parts.facts.refresh()
        committed, metadata = await self._parts.broker.committed(partition)
        async with asyncio.timeout(timeout_s):
            beginning = (await self._consumer.beginning_offsets([partition]))[partition]
        async with asyncio.timeout(timeout_s):
            end = (await self._consumer.end_offsets([partition]))[partition]
        start = start_of(committed, self._parts.committed.get(partition), beginning, end)
        crashpoint("on_assigned_before_seek")
        if self._revoked:
            return None
        self._consumer.seek(partition, start.position)
        suspects = {} if start.lost else read_suspects(metadata)
        window = Window(start.position, suspects, self._settings.window_records, self._settings.window_bytes)
        if start.lost:
            self._warn_lost(start, committed, beginning, end)
            window.remember = True
        self._begin_again = self._told = False
        self.window = window
        log.info("partition open", partition=partition.partition, position=start.position, suspects=len(suspects))
        return window

    def _warn_lost(self, start: Start, committed: int | None, beginning: int, end: int) -> None:
        self._parts.metrics.offsets_lost.inc()
        log.warning(
            "offsets lost",
            topic=self.partition.topic,
            partition=self.partition.partition,
            reason=start.lost,
            gap=start.gap,
            committed=committed,
            beginning=beginning,
            end=end,
            position=start.position,
        )

    async def _serve(self, window: Window, producer: PartitionProducer) -> None:
        """Commit what gets finished until the partition is drained or has to begin again."""
        while True:
            window.changed.clear()
            due_s = self._due_in_s(window)
            if due_s <= 0:
                await self._transact(window, producer)
                self._backoff.reset()
            elif self._flush or (self._begin_again and not window.uncommitted):
                return
            else:
                await happens(window.changed, due_s)

    def _due_in_s(self, window: Window) -> float:
        """Return the seconds until the next transaction is due; a record nothing waits for is not kept waiting."""
        if window.remember:
            return 0.0
        if not window.finished or window.finished_since_s is None:
            return IDLE_S
        if window.finished >= self._settings.transaction_records or not window.unfinished or not window.is_open:
            return 0.0
        return window.finished_since_s + self._settings.commit_interval_ms / 1000 - time.monotonic()

    async def _transact(self, window: Window, producer: PartitionProducer) -> None:
        records = window.prefix(self._settings.transaction_records)
        offset = records[-1].source.offset + 1 if records else window.position
        facts = self._parts.facts
        written = await asyncio.to_thread(outgoing, records, facts.results, facts.dead_letters)
        window.remember = False
        await producer.commit(written, offset, write_suspects(window.suspects, offset))
        self._parts.committed[self.partition] = offset
        self._parts.progress.records += len(records)
        window.committed(records)
        count(records, self._parts.metrics, self._parts.known_models())

    async def drain(self, task: "asyncio.Task[None]", deadline_s: float) -> None:
        """Let running micro-batches finish, commit what is finished, and end ``task`` (``run``) by the deadline."""
        self._revoked = True
        try:
            if self.window is not None:
                await self._finish(self.window, task, deadline_s)
        finally:
            # Also where the drain itself is cut short: nobody else ends the task.
            if not task.done():
                task.cancel()
            await asyncio.wait([task], timeout=self._settings.kafka_timeout_s)

    async def _finish(self, window: Window, task: "asyncio.Task[None]", deadline_s: float) -> None:
        window.stop()
        while self._has_rows_in_flight(window) and time.monotonic() < deadline_s:  # noqa: ASYNC110 (rows tell no event)
            await asyncio.sleep(LOOK_AGAIN_S)
        self._flush = True
        window.changed.set()
        await asyncio.wait([task], timeout=max(0.1, deadline_s - time.monotonic()))

    def _has_rows_in_flight(self, window: Window) -> bool:
        return any(
            isinstance(row.owner, Record) and row.owner.window is window for row in self._parts.lane.rows_in_flight()
        )
