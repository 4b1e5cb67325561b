"""What is told of jobs that came by topic: acceptance, end and refusal on the events topic, refused bodies as dead letters."""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer

from batch_consumer.bootstrap import ends_by_itself
from batch_consumer.broker import Broker, Trouble
from batch_consumer.producers import end, read_outcome
from batch_consumer.results import Arrived, Target, dead_letter
from batch_consumer.transactions import MAX_BATCH_BYTES, Outgoing
from jobs.records import Notification
from jobs.render import job_json
from serving.codec import encode_json
from serving.errors import DependencyDown, TwodoorError
from serving.settings import ConsumerSettings, KafkaSettings

CLOSE_TIMEOUT_S = 2.0
_CONTENT_TYPE = ("content-type", b"application/json")


class Events:
    """The one producer of a process for both topics: idempotent, made at first use, made anew after any trouble.

    Everything is told at least once: after an error or a timeout the caller tells it again.
    """

    def __init__(self, kafka: KafkaSettings, settings: ConsumerSettings, broker: Broker) -> None:
        self._kafka = kafka
        self._timeout_s = settings.kafka_timeout_s
        self._broker = broker
        self._producer: Any = None
        self._lock = asyncio.Lock()
        self._events = Target(kafka.jobs_events_topic, 1, kafka.max_message_bytes)
        self._dead_letters = Target(kafka.jobs_dlq_topic, 1, kafka.max_message_bytes)

    async def connect(self) -> None:
        """Make sure that there is a producer; raises DependencyDown."""
        await self._started()

    async def announce(self, notifications: Sequence[Notification]) -> None:
        """Tell acceptances and ends; returns once Kafka has them all. Raises DependencyDown."""
        producer = await self._started()
        await self._send(producer, [_announcement(notification, self._events) for notification in notifications])

    async def refuse(self, arrived: Arrived, reason: TwodoorError, trace: Mapping[str, str]) -> None:
        """Keep a refused body as a dead letter and tell its refusal, with the trace it came with. Raises DependencyDown."""
        producer = await self._started()
        letter = dead_letter(arrived, reason, self._dead_letters)
        await self._send(producer, [letter, _refusal(arrived, reason, trace, self._events)])

    async def close(self) -> None:
        """End the producer; what it has not delivered is told again by whoever comes next."""
        await self._discard(self._producer, CLOSE_TIMEOUT_S)

    async def _started(self) -> Any:
        async with self._lock:
            if self._producer is None:
                try:
                    await self._learn()
                    self._producer = await self._start()
                except Trouble as exc:
                    raise _down(exc) from exc
            return self._producer

    async def _learn(self) -> None:
        """Ask how many partitions both topics have and how much they take."""
        names = [self._kafka.jobs_events_topic, self._kafka.jobs_dlq_topic]
        sizes = await self._broker.max_message_bytes(names)
        counts = await self._broker.partition_counts(names)
        if missing := set(names) - sizes.keys():
            raise DependencyDown(f"Kafka says nothing of topic {', '.join(sorted(missing))}")
        self._events, self._dead_letters = (Target(name, counts[name], sizes[name]) for name in names)

    async def _start(self) -> Any:
        limits = (self._events.max_message_bytes, self._dead_letters.max_message_bytes)
        producer: Any = AIOKafkaProducer(
            bootstrap_servers=self._kafka.bootstrap_servers,
            client_id="twodoor-consumer-events",
            enable_idempotence=True,
            acks="all",
            # A topic's limit is one of batches: what both take.
            max_batch_size=min(MAX_BATCH_BYTES, *limits),
            max_request_size=max(limits),
            request_timeout_ms=int(self._timeout_s * 1000),
            metadata_max_age_ms=30_000,
        )
        ends_by_itself(producer.client)
        try:
            async with asyncio.timeout(self._timeout_s):
                await producer.start()
        except BaseException:
            await end(producer, self._timeout_s)
            raise
        return producer

    async def _send(self, producer: Any, records: Sequence[Outgoing]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await _deliver(producer, records)
        except Trouble as exc:
            # A batch of an idempotent producer never expires, and one that failed leaves a gap in its sequence.
            await self._discard(producer)
            raise _down(exc) from exc

    async def _discard(self, producer: Any, timeout_s: float | None = None) -> None:
        if self._producer is producer:
            self._producer = None
        if producer is not None:
            await end(producer, timeout_s or self._timeout_s)


async def _deliver(producer: Any, records: Sequence[Outgoing]) -> None:
    deliveries: list[Any] = []
    for record in records:
        delivery = await producer.send(
            record.topic, record.value, key=record.key, partition=record.partition, headers=list(record.headers)
        )
        # Read by this also where it is not waited for; cancelling one would leave its error unread inside the client.
        delivery.add_done_callback(read_outcome)
        deliveries.append(delivery)
    await asyncio.wait(deliveries)
    for delivery in deliveries:
        delivery.result()


def event_json(notification: Notification, *, slim: bool = False) -> bytes:
    """Return an event's value: the job as the HTTP interface shows it, ``event`` and ``source``."""
    job = notification.job
    content = job_json(job) | {"event": notification.kind, "source": job.source}
    return encode_json(content | {"metadata": {}, "metadata_omitted": True} if slim else content)


def _announcement(notification: Notification, target: Target) -> Outgoing:
    key = notification.job.id.encode()
    partition = zlib.crc32(key) % target.partitions
    event = Outgoing(target.topic, partition, key, event_json(notification), (_CONTENT_TYPE,))
    if event.size_bytes <= target.max_message_bytes:
        return event
    # A topic that takes less than the metadata must not keep the end of the job from being told.
    return Outgoing(target.topic, partition, key, event_json(notification, slim=True), (_CONTENT_TYPE,))


def _refusal(arrived: Arrived, reason: TwodoorError, trace: Mapping[str, str], target: Target) -> Outgoing:
    source = arrived.source
    content = {
        "event": "refused",
        "code": reason.code,
        "message": str(reason).encode(errors="replace").decode(),
        "source": {"topic": source.topic, "partition": source.partition, "offset": source.offset},
    }
    headers = (_CONTENT_TYPE, *((name, value.encode()) for name, value in trace.items()))
    key = arrived.key if arrived.key is not None and len(arrived.key) <= target.max_message_bytes // 2 else None
    return Outgoing(target.topic, target.partition_of(source.partition), key, encode_json(content), headers)


def _down(exc: BaseException) -> DependencyDown:
    return DependencyDown(f"Kafka takes no events of jobs: {type(exc).__name__}")
