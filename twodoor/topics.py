"""The topics from a command's side: connect, send, read to an end; every wait has a bound, Kafka away is one clear line."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from twodoor.config import ClientConfig
from twodoor.console import Exit, fail, needs

T = TypeVar("T")

CONNECT_TIMEOUT_S = 15.0
# How long closing may take: an idempotent producer would otherwise wait for a broker that is away.
CLOSE_TIMEOUT_S = 5.0


class KafkaAway(Exception):
    """Kafka does not answer, or not within the bound; the message is one line for a person."""


class TopicTrouble(Exception):
    """Kafka answers and the topic cannot be used; the message is one line for a person."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; turns the trouble above into the exit code that names it."""
    # aiokafka logs every try to connect; the command says it once.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        return asyncio.run(main)
    except KafkaAway as exc:
        fail(str(exc), Exit.NOT_REACHABLE)
    except TopicTrouble as exc:
        fail(str(exc))


@contextmanager
def _translated(config: ClientConfig) -> Iterator[None]:
    from aiokafka import errors

    away = (errors.KafkaConnectionError, errors.KafkaTimeoutError, errors.RequestTimedOutError, TimeoutError)
    try:
        yield
    except away as exc:
        raise KafkaAway(f"Kafka does not answer at {config.bootstrap_servers}") from exc
    except errors.KafkaError as exc:
        raise TopicTrouble(f"Kafka refused: {type(exc).__name__}") from exc


@asynccontextmanager
async def started(config: ClientConfig, part: Any) -> AsyncIterator[Any]:
    """Start an aiokafka producer or consumer and stop it again, both within bounds."""
    try:
        with _translated(config):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await part.start()
            yield part
    finally:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await part.stop()
        except TimeoutError:
            logging.getLogger(__name__).warning("closing the connection to Kafka took too long and was given up")


def producer(config: ClientConfig, **options: Any) -> Any:
    """Return an idempotent producer; not started."""
    with needs("server"):
        from aiokafka import AIOKafkaProducer
    return AIOKafkaProducer(
        bootstrap_servers=config.bootstrap_servers,
        enable_idempotence=True,
        acks="all",
        max_request_size=8 * config.max_message_bytes,
        **options,
    )


def reader(config: ClientConfig, group_id: str | None = None) -> Any:
    """Return a consumer that sees only what was committed; it commits nothing by itself. Not started."""
    with needs("server"):
        from aiokafka import AIOKafkaConsumer
    return AIOKafkaConsumer(
        bootstrap_servers=config.bootstrap_servers,
        group_id=group_id,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        # Larger than any record, so that none is passed over (aiokafka#1173).
        max_partition_fetch_bytes=4 * config.max_message_bytes,
    )


async def assign_all(consumer: Any, topic: str) -> list[Any]:
    """Give a started consumer every partition of a topic; raises TopicTrouble where there is no such topic."""
    from aiokafka import TopicPartition

    partitions = sorted(await partitions_of(consumer, topic))
    assigned = [TopicPartition(topic, number) for number in partitions]
    consumer.assign(assigned)
    return assigned


async def partitions_of(part: Any, topic: str) -> set[int]:
    """Return a topic's partition numbers, asked of the broker; raises TopicTrouble where there is no such topic."""
    client = getattr(part, "client", None) or part._client
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        cluster = await client.fetch_all_metadata()
    numbers: set[int] | None = cluster.partitions_for_topic(topic)
    if not numbers:
        raise TopicTrouble(f"Kafka has no topic {topic}")
    return numbers


async def read_to_end(consumer: Any, partitions: list[Any], idle_timeout_s: float = 10.0) -> AsyncIterator[Any]:
    """Yield the records up to the end as it is now; an end inside an open transaction is where that begins."""
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        ends = await consumer.end_offsets(partitions)
        open_partitions = [tp for tp in partitions if await consumer.position(tp) < ends[tp]]
    loop = asyncio.get_running_loop()
    progress_at = loop.time()
    while open_partitions:
        batch = await consumer.getmany(*open_partitions, timeout_ms=500, max_records=500)
        for tp, records in batch.items():
            for record in records:
                if record.offset < ends[tp]:
                    yield record
        # The position also passes what is no record: the markers of transactions, and aborted ones.
        still_open = [tp for tp in open_partitions if await consumer.position(tp) < ends[tp]]
        if batch or len(still_open) < len(open_partitions):
            progress_at = loop.time()
        elif loop.time() - progress_at > idle_timeout_s:
            raise KafkaAway(f"Kafka gave no record for {idle_timeout_s:.0f} s, and the topic has not ended")
        open_partitions = still_open
