"""One transactional producer per owned source partition: results and the offsets they answer become visible together."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from batch_consumer.bootstrap import ends_by_itself
from batch_consumer.producers import end, read_errors, read_outcome
from serving.crashpoint import crashpoint
from serving.settings import ConsumerSettings, KafkaSettings

# Bytes Kafka adds to one record alone in its batch: batch header, lengths, offset and timestamp.
BATCH_OVERHEAD_BYTES = 128
MAX_BATCH_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One record to write."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    @property
    def size_bytes(self) -> int:
        """An upper bound of the record's bytes in a batch of its own."""
        headers = sum(len(name.encode()) + len(value or b"") + 10 for name, value in self.headers)
        return len(self.key or b"") + len(self.value or b"") + headers + BATCH_OVERHEAD_BYTES


class PartitionProducer:
    """The fence of one source partition: starting it ends whatever transaction an earlier owner left open.

    After any error it is of no use any more: close it, start a new one, and ask Kafka how far the partition came.
    """

    def __init__(
        self, kafka: KafkaSettings, settings: ConsumerSettings, source: TopicPartition, max_batch_bytes: int
    ) -> None:
        """``max_batch_bytes`` is what every topic written to takes: a topic's limit is one of batches, not of records."""
        self._settings = settings
        self._source = source
        self._producer: Any = AIOKafkaProducer(
            bootstrap_servers=kafka.bootstrap_servers,
            client_id=f"twodoor-consumer-{source.topic}-{source.partition}",
            transactional_id=f"{settings.group_id}.{source.topic}.{source.partition}",
            transaction_timeout_ms=settings.transaction_timeout_ms,
            enable_idempotence=True,
            acks="all",
            max_batch_size=min(MAX_BATCH_BYTES, max_batch_bytes),
            request_timeout_ms=int(settings.kafka_timeout_s * 1000),
            metadata_max_age_ms=30_000,
        )
        ends_by_itself(self._producer.client)

    async def start(self) -> None:
        """Connect and fence the old owner; raises one of ``Trouble``, TimeoutError too."""
        try:
            # An old owner's transaction has to be ended first, which the broker does within seconds.
            async with asyncio.timeout(self._settings.kafka_timeout_s):
                await self._producer.start()
        except BaseException:
            await self.close()
            raise

    async def commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        """Write records and the source's next offset in one transaction; raises one of ``Trouble``.

        After an error or a timeout the outcome is unknown; only a new producer and the committed offset tell it.
        """
        try:
            async with asyncio.timeout(self._settings.kafka_timeout_s):
                await self._commit(records, offset, metadata)
        finally:
            read_errors(self._producer)

    async def _commit(self, records: Sequence[Outgoing], offset: int, metadata: str) -> None:
        producer = self._producer
        await producer.begin_transaction()
        # A fatal error replaces this future where it holds an error already, unread.
        producer._txn_manager.wait_for_transaction_end().add_done_callback(read_outcome)
        crashpoint("after_begin")
        deliveries: list[Any] = []
        for (topic, partition), batch in self._batches(records):
            deliveries.append(await producer.send_batch(batch, topic, partition=partition))
            # Read by this also where it is not waited for: batches of an idempotent producer never expire. Cancelling
            # one would leave its error unread inside the client.
            deliveries[-1].add_done_callback(read_outcome)
        if deliveries:
            await asyncio.wait(deliveries)
        for delivery in deliveries:
            delivery.result()
        crashpoint("after_send")
        await producer.send_offsets_to_transaction(
            {self._source: OffsetAndMetadata(offset, metadata)}, self._settings.group_id
        )
        crashpoint("after_offsets")
        crashpoint("before_commit")
        await producer.commit_transaction()
        crashpoint("after_commit")

    def _batches(self, records: Sequence[Outgoing]) -> list[tuple[tuple[str, int], Any]]:
        """Pack records into batches of one partition each, in order within a partition.

        A batch costs one future where ``send`` costs one a record.
        """
        batches: list[tuple[tuple[str, int], Any]] = []
        open_batches: dict[tuple[str, int], Any] = {}
        for record in records:
            place = (record.topic, record.partition)
            batch = open_batches.get(place)
            if batch is None or not _append(batch, record):
                batch = open_batches[place] = self._producer.create_batch()
                batches.append((place, batch))
                _append(batch, record)
        for _, batch in batches:
            batch.close()
        return batches

    async def close(self) -> None:
        """Close within the deadline, whatever state the producer is in; an open transaction is left to the next fence.

        A cancelled close goes on to its end: cut short, the client's sender would live on.
        """
        closing = asyncio.create_task(
            end(self._producer, self._settings.kafka_timeout_s), name=f"close producer {self._source.partition}"
        )
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing], timeout=2 * self._settings.kafka_timeout_s)
            raise


def _append(batch: Any, record: Outgoing) -> bool:
    return batch.append(timestamp=None, key=record.key, value=record.value, headers=list(record.headers)) is not None
