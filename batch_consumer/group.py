"""The Kafka consumer of a group as both topic doors use it: how it is made, asked for one partition's records, and stopped."""

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from batch_consumer.bootstrap import ends_by_itself
from batch_consumer.broker import Trouble
from serving.settings import ConsumerSettings, KafkaSettings

log = structlog.get_logger(__name__)


class UndecodableRecord(KafkaError):  # type: ignore[misc]
    """The client cannot even split the record into its parts: a header name that is not UTF-8, a codec's garbage."""


def _drain_s(settings: ConsumerSettings) -> float:
    """Return how long a member may need until it has drained and committed, in seconds."""
    return settings.drain_timeout_s + 2 * settings.kafka_timeout_s


def join_limit_s(settings: ConsumerSettings) -> float:
    """Return a time longer than any rebalance: other members drain for as long as this one may, and a late one is evicted."""
    return 3 * _drain_s(settings)


def make_consumer(
    kafka: KafkaSettings, settings: ConsumerSettings, client_id: str, max_partition_fetch_bytes: int
) -> Any:
    """Return a consumer of the settings' group; not started, and subscribed to nothing."""
    drain_ms = int(_drain_s(settings) * 1000)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.bootstrap_servers,
        client_id=client_id,
        group_id=settings.group_id,
        enable_auto_commit=False,
        # Where to begin is looked up by whoever owns a partition. An offset out of range must come up as an error: with
        # "earliest" or "latest" aiokafka would move on without a word.
        auto_offset_reset="none",
        isolation_level="read_committed",
        max_partition_fetch_bytes=max_partition_fetch_bytes,
        session_timeout_ms=settings.session_timeout_ms,
        heartbeat_interval_ms=settings.session_timeout_ms // 3,
        max_poll_interval_ms=settings.max_poll_interval_ms,
        # aiokafka's default is the session timeout: a drain longer than that would get the member evicted.
        rebalance_timeout_ms=max(settings.session_timeout_ms, drain_ms),
        request_timeout_ms=int(max(settings.kafka_timeout_s * 1000, drain_ms + 5_000)),
        metadata_max_age_ms=10_000,
    )
    ends_by_itself(consumer._client)
    return consumer


async def records_of(consumer: Any, partition: TopicPartition, most: int) -> Sequence[Any]:
    """Return up to ``most`` records of one partition that are there now; raises KafkaError, UndecodableRecord too."""
    try:
        found = await consumer.getmany(partition, timeout_ms=0, max_records=most)
    except KafkaError:
        raise
    except Exception as error:
        raise UndecodableRecord(type(error).__name__) from error
    records: Sequence[Any] = found.get(partition) or ()
    return records


async def stop_consumer(consumer: Any, timeout_s: float, topic: str) -> None:
    """Leave the group and close the connections, within ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            await consumer.stop()
    except Trouble as error:
        log.info("consumer did not stop in order", topic=topic, error=type(error).__name__)
