"""One Kafka consumer of the jobs topic from start to stop: its partitions, its rebalances, the loop that reads records."""

import asyncio
import time
from typing import Any

import structlog
from aiokafka import ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError, RecordTooLargeError

from batch_consumer.broker import Trouble
from batch_consumer.group import UndecodableRecord, join_limit_s, make_consumer, records_of, stop_consumer
from batch_consumer.jobs_partition import JobsPartition, JobsParts

log = structlog.get_logger(__name__)

IDLE_WAIT_MS = 100
# A job is much work, and a record may be as large as the topic takes.
MAX_RECORDS_PER_VISIT = 8

_BLOCKS = {RecordTooLargeError: "record_too_large", UndecodableRecord: "undecodable_record"}


class JobsSession(ConsumerRebalanceListener):  # type: ignore[misc]
    """One Kafka consumer with the partitions it owns. It polls all the time, whatever its records wait for."""

    def __init__(self, parts: JobsParts, fetch_bytes: int) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._owned: dict[TopicPartition, tuple[JobsPartition, asyncio.Task[None]]] = {}
        self._draining = asyncio.Lock()
        self._closing = False
        self._read_at_s = time.monotonic()
        self._rebalancing_since_s: float | None = None
        topic = parts.kafka.jobs_topic
        self._nowhere = TopicPartition(topic, -1)
        self._drain_s = self._settings.drain_timeout_s * 0.8
        self._join_limit_s = join_limit_s(self._settings)
        self._consumer: Any = self._make_consumer(fetch_bytes)
        self._consumer.subscribe([topic], listener=self)

    def _make_consumer(self, fetch_bytes: int) -> Any:
        return make_consumer(self._parts.kafka, self._settings, "twodoor-consumer-jobs", fetch_bytes)

    async def run(self, stop: asyncio.Event) -> None:
        """Read until ``stop``; raises one of ``Trouble`` where the consumer cannot go on."""
        loops = [
            asyncio.create_task(self._start_and_read(), name="jobs reader"),
            asyncio.create_task(self._watch(), name="jobs watch"),
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            # Also where a call of the client does not return: it has no limit in a rebalance.
            done, _ = await asyncio.wait([*loops, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*loops, stopping):
                task.cancel()
            await asyncio.gather(*loops, stopping, return_exceptions=True)
            # From here on a rebalance brings no partitions: nobody would drain them.
            self._closing = True
            await self._drain()
            await stop_consumer(self._consumer, self._settings.kafka_timeout_s, self._parts.kafka.jobs_topic)

    async def _start_and_read(self) -> None:
        async with asyncio.timeout(self._join_limit_s):
            await self._consumer.start()
        while True:
            if not await self._visit_all():
                # Nothing to read: wait for data of any partition, and reset the poll timer. No records come back.
                await self._consumer.getmany(self._nowhere, timeout_ms=IDLE_WAIT_MS)
            for _, task in self._owned.values():
                if task.done():
                    task.result()

    async def _visit_all(self) -> int:
        """Read from every partition that wants records; returns how many came."""
        read = 0
        for partition, (owned, _) in list(self._owned.items()):
            if owned.wants:
                try:
                    read += await self._visit(partition, owned)
                except KafkaError as error:
                    self._unreadable(partition, owned, error)
        if read:
            self._read_at_s = time.monotonic()
        return read

    async def _visit(self, partition: TopicPartition, owned: JobsPartition) -> int:
        opening = owned.opening
        messages = await records_of(self._consumer, partition, MAX_RECORDS_PER_VISIT)
        if not messages:
            return 0
        if owned.is_open and owned.opening == opening:
            owned.give(messages)
            return len(messages)
        if owned.is_open and partition in self._consumer.assignment():
            # They were read for an earlier opening: this one reads from its own place.
            self._consumer.seek(partition, owned.next_read)
        return 0

    def _unreadable(self, partition: TopicPartition, owned: JobsPartition, error: KafkaError) -> None:
        """Deal with an error of one partition; the client may have moved its position past what it could not give."""
        if partition not in self._consumer.assignment() or not owned.is_open:
            return
        for kind, reason in _BLOCKS.items():
            if isinstance(error, kind):
                self._consumer.seek(partition, owned.next_read)
                log.error(
                    "a record of jobs cannot be read: the partition stands still", reason=reason,
                    topic=partition.topic, partition=partition.partition, offset=owned.next_read, error=str(error),
                )  # fmt: skip
                owned.block(reason)
                return
        how = log.warning if isinstance(error, OffsetOutOfRangeError) else log.error
        how(
            "records of jobs cannot be read", partition=partition.partition, position=owned.next_read,
            error=type(error).__name__,
        )  # fmt: skip
        owned.begin_again()

    async def _watch(self) -> None:
        """Measure the lag now and then; raises TimeoutError where the client gives nothing although there is something.

        So does a client whose rebalance does not end: it has no partition, and so no lag that would show it.
        """
        while True:
            await asyncio.sleep(self._settings.kafka_check_interval_s)
            since_s = self._rebalancing_since_s
            if since_s is not None and time.monotonic() - since_s > self._join_limit_s:
                raise TimeoutError("the rebalance of the jobs topic does not end")
            try:
                async with asyncio.timeout(self._settings.kafka_timeout_s):
                    unread = await self._measure()
            except Trouble as error:
                log.debug("no lag of jobs", error=type(error).__name__)
                continue
            if not unread:
                self._read_at_s = time.monotonic()
            elif time.monotonic() - self._read_at_s > self._settings.stall_timeout_s / 2:
                raise TimeoutError("the Kafka consumer gives no records of jobs")

    async def _measure(self) -> bool:
        """Report the lag; returns whether a partition that wants records has some it was not given.

        Counted from what was read, so that a transaction marker at the end, which nobody can read, is no lag.
        """
        opened = {partition: owned for partition, (owned, _) in self._owned.items() if owned.is_open}
        ends = await self._consumer.end_offsets(list(opened)) if opened else {}
        lag, behind = 0, False
        for partition, owned in opened.items():
            if not owned.is_open or partition not in self._consumer.assignment():
                continue
            unread = max(0, ends[partition] - await self._consumer.position(partition))
            lag += unread + owned.next_read - owned.position
            behind = behind or bool(unread and owned.wants)
        self._parts.metrics.lag.labels(self._parts.kafka.jobs_topic).set(lag)
        return behind

    # -- rebalances ---------------------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """Finish the records in hand and commit them, within the drain time; all partitions go at every rebalance."""
        self._rebalancing_since_s = time.monotonic()
        await self._drain()

    async def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        """Own the new partitions, each by a task of its own: no heartbeat is sent while this method runs."""
        self._rebalancing_since_s = None
        if self._closing:
            return
        log.info("partitions of jobs assigned", partitions=sorted(partition.partition for partition in assigned))
        for partition in assigned:
            owned = JobsPartition(partition, self._consumer, self._parts)
            task = asyncio.create_task(owned.run(), name=f"jobs partition {partition.partition}")
            self._owned[partition] = (owned, task)

    async def _drain(self) -> None:
        # A rebalance may be draining when the session ends: the client is stopped only after that.
        async with self._draining:
            owned, self._owned = list(self._owned.values()), {}
            await asyncio.gather(*(one.drain(task, self._drain_s) for one, task in owned))
