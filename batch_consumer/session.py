"""One Kafka consumer from start to stop: its partitions, its rebalances, and the loop that reads records into windows."""

import asyncio
import time
from typing import Any

import structlog
from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError, RecordTooLargeError

from batch_consumer.group import UndecodableRecord, join_limit_s, make_consumer, records_of, stop_consumer
from batch_consumer.intake import take_in
from batch_consumer.owned import OwnedPartition, Parts
from serving.crashpoint import crashpoint

log = structlog.get_logger(__name__)

IDLE_WAIT_MS = 50
# A record may hold many rows: a bound for each visit keeps the window's overshoot small.
MAX_RECORDS_PER_VISIT = 128


class Session(ConsumerRebalanceListener):  # type: ignore[misc]
    """One Kafka consumer from start to stop, with the partitions it owns."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._owned: dict[TopicPartition, tuple[OwnedPartition, asyncio.Task[None]]] = {}
        self._ended = asyncio.Event()
        self._closing = False
        self._draining = asyncio.Lock()
        self._read_at_s = time.monotonic()
        self._behind = False
        self._closed_since_s: dict[TopicPartition, float] = {}
        self._rebalancing_since_s: float | None = None
        self._join_limit_s = join_limit_s(self._settings)
        topic = parts.kafka.requests_topic
        self._nowhere = TopicPartition(topic, -1)
        self._consumer: Any = self._make_consumer()
        self._consumer.subscribe([topic], listener=self)

    def _make_consumer(self) -> Any:
        fetch_bytes = self._settings.max_partition_fetch_bytes
        return make_consumer(self._parts.kafka, self._settings, "twodoor-consumer", fetch_bytes)

    @property
    def is_stuck(self) -> bool:
        """Whether a partition has room and unread records, and none has come for half of the stall timeout.

        So is a client whose rebalance does not end: it has no partition, and so no lag that would show it. And so is one
        with a partition that does not open while Kafka answers: that one has no lag either.
        """
        now_s = time.monotonic()
        if self._rebalancing_since_s is not None and now_s - self._rebalancing_since_s > self._join_limit_s:
            return True
        limit_s = self._settings.stall_timeout_s / 2
        if any(now_s - since_s > limit_s for since_s in self._closed_since_s.values()):
            return True
        return self._behind and now_s - self._read_at_s > limit_s

    def look_at_closed(self, kafka_answers: bool) -> None:
        """Note since when partitions are owned and not open; while Kafka is away none can be opened."""
        closed = [partition for partition, (owned, _) in self._owned.items() if not owned.is_open and not owned.blocked]
        now_s = time.monotonic()
        self._closed_since_s = {tp: self._closed_since_s.get(tp, now_s) for tp in closed} if kafka_answers else {}

    def end(self) -> None:
        """Make ``run`` return."""
        self._ended.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop`` or ``end``; raises one of ``Trouble`` where the consumer cannot go on."""
        try:
            await self._start(stop)
            await self._read_until(stop)
        finally:
            # From here on a rebalance brings no partitions: nobody would drain them.
            self._closing = True
            await self._drain()
            await stop_consumer(self._consumer, self._settings.kafka_timeout_s, self._parts.kafka.requests_topic)

    async def _start(self, stop: asyncio.Event) -> None:
        """Start the consumer; joining a group takes as long as its other members' drain, so ``stop`` may cut it short."""
        starting = asyncio.ensure_future(self._consumer.start())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([starting, stopping], timeout=self._join_limit_s, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            elif not stop.is_set():
                raise TimeoutError("the consumer did not join its group in time")
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.wait([starting, stopping])

    async def _read_until(self, stop: asyncio.Event) -> None:
        """Read until ``stop`` or ``end``, also where a call of the client does not return: it has no limit in a rebalance."""
        reading = asyncio.create_task(self._read(stop), name="topic reader")
        ends = [asyncio.create_task(event.wait()) for event in (stop, self._ended)]
        try:
            await asyncio.wait([reading, *ends], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            for task in (reading, *ends):
                task.cancel()
            # What the reader had in its hands is in no window: it is not committed, and is read again.
            await asyncio.gather(reading, *ends, return_exceptions=True)

    async def _read(self, stop: asyncio.Event) -> None:
        while not (stop.is_set() or self._ended.is_set()):
            if not await self._visit_all():
                # Nothing to read: wait for data of any partition, and reset the poll timer. No records come back.
                await self._consumer.getmany(self._nowhere, timeout_ms=IDLE_WAIT_MS)
            self._check_tasks()

    async def _visit_all(self) -> int:
        """Read from every partition that has room; returns how many records came.

        Each partition by its own call: one call for all lets the first take everything, and loses what it has already
        taken from the others when one of them raises.
        """
        read = 0
        for partition, (owned, _) in list(self._owned.items()):
            if owned.room:
                try:
                    read += await self._visit(partition, owned)
                except KafkaError as error:
                    self._unreadable(partition, owned, error)
        if read:
            self._read_at_s = time.monotonic()
        return read

    async def _visit(self, partition: TopicPartition, owned: OwnedPartition) -> int:
        window = owned.window
        if window is None:
            return 0
        most = min(owned.room, MAX_RECORDS_PER_VISIT)
        messages = await records_of(self._consumer, partition, most)
        if not messages:
            return 0
        if not window.is_open:
            self._put_back(partition)
            return 0
        crashpoint("after_fetch")
        window.next_read = messages[-1].offset + 1
        self._parts.lane.submit(await take_in(window, messages, self._settings))
        return len(messages)

    def _put_back(self, partition: TopicPartition) -> None:
        """Let records that came for a window closed meanwhile be read again by the window that is open now, if any."""
        owned, _ = self._owned.get(partition, (None, None))
        if owned is not None and owned.window is not None and partition in self._consumer.assignment():
            self._consumer.seek(partition, owned.window.next_read)

    def _unreadable(self, partition: TopicPartition, owned: OwnedPartition, error: KafkaError) -> None:
        """Deal with an error of one partition. aiokafka may have moved its position past what it could not give us."""
        if partition not in self._consumer.assignment() or owned.window is None:
            return
        if isinstance(error, OffsetOutOfRangeError):
            log.warning("offset out of range", partition=partition.partition, position=owned.window.next_read)
            owned.begin_again()
            return
        self._consumer.seek(partition, owned.window.next_read)
        if isinstance(error, RecordTooLargeError):
            log.error(
                "a record is larger than the fetch size: the partition stands still",
                partition=partition.partition,
                offset=owned.window.next_read,
                max_partition_fetch_bytes=self._settings.max_partition_fetch_bytes,
            )
            owned.block("record_too_large")
            return
        if isinstance(error, UndecodableRecord):
            log.error(
                "a record breaks the Kafka client's decoder: the partition stands still",
                partition=partition.partition,
                offset=owned.window.next_read,
                error=str(error),
            )
            owned.block("undecodable_record")
            return
        log.error("records cannot be read", partition=partition.partition, error=type(error).__name__)
        owned.begin_again()

    def _check_tasks(self) -> None:
        for _, task in self._owned.values():
            if task.done():
                # A bug ended it: the session ends with its error, and a new one begins at the committed offsets.
                task.result()

    async def measure_lag(self) -> int:
        """Return how many records of the owned partitions are not committed; raises one of ``Trouble``.

        Counted from what was read, so that a transaction marker at the end, which nobody can read, is no lag.
        """
        partitions = [partition for partition, (owned, _) in self._owned.items() if owned.is_open]
        if not partitions:
            self._behind = False
            return 0
        async with asyncio.timeout(self._settings.kafka_timeout_s):
            ends = await self._consumer.end_offsets(partitions)
            lag, behind = 0, False
            for partition in partitions:
                owned, _ = self._owned.get(partition, (None, None))
                if owned is None or owned.window is None or partition not in self._consumer.assignment():
                    continue
                unread = max(0, ends[partition] - await self._consumer.position(partition))
                behind = behind or bool(unread and owned.room)
                lag += unread + owned.window.uncommitted
        if not behind:
            self._read_at_s = time.monotonic()
        self._behind = behind
        return lag

    # -- rebalances ---------------------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Finish what runs and commit it, within the drain time; all partitions go at every rebalance."""
        self._rebalancing_since_s = time.monotonic()
        if revoked:
            log.info("partitions revoked", partitions=sorted(partition.partition for partition in revoked))
        await self._drain()

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """Own the new partitions, each by a task of its own: no heartbeat is sent while this method runs."""
        self._rebalancing_since_s = None
        if self._closing:
            return
        log.info("partitions assigned", partitions=sorted(partition.partition for partition in assigned))
        for partition in assigned:
            owned = OwnedPartition(partition, self._consumer, self._parts)
            task = asyncio.create_task(owned.run(), name=f"partition {partition.partition}")
            self._owned[partition] = (owned, task)

    async def _drain(self) -> None:
        # A rebalance may be draining when the session ends: the client is stopped only after that.
        async with self._draining:
            owned, self._owned = list(self._owned.values()), {}
            deadline_s = time.monotonic() + self._settings.drain_timeout_s * 0.8
            await asyncio.gather(*(one.drain(task, deadline_s) for one, task in owned))
            self._parts.lane.drop_dead()
