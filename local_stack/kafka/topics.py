"""The topics Twodoor needs, made where they are missing; listing them is also how we see that the broker answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError

from serving.settings import KafkaSettings

ASK_TIMEOUT_S = 5.0
# A dead letter is a record as it came and five headers more.
DLQ_HEADERS_BYTES = 64 * 2**10


@asynccontextmanager
async def admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """An admin client for one short conversation."""
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=int(ASK_TIMEOUT_S * 1000))
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def answers(bootstrap: str) -> bool:
    """Whether the broker answers a metadata request."""
    host, port = bootstrap.rsplit(":", 1)
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            # A refused connection would make aiokafka log an error at every ask.
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            async with admin(bootstrap) as client:
                await client.list_topics()
    except (OSError, KafkaError, TimeoutError):
        return False
    return True


async def ensure_topics(bootstrap: str, settings: KafkaSettings) -> list[str]:
    """Create the topics that are missing and return their names; raises KafkaError or TimeoutError."""
    size = settings.max_message_bytes
    wanted = {
        settings.requests_topic: (settings.partitions, size),
        settings.results_topic: (settings.partitions, size),
        settings.dlq_topic: (1, size + DLQ_HEADERS_BYTES),
        settings.jobs_topic: (settings.partitions, size),
        settings.jobs_events_topic: (settings.partitions, size),
        settings.jobs_dlq_topic: (1, size + DLQ_HEADERS_BYTES),
    }
    async with asyncio.timeout(ASK_TIMEOUT_S * 2), admin(bootstrap) as client:
        missing = sorted(set(wanted) - set(await client.list_topics()))
        if missing:
            await _create(client, {name: wanted[name] for name in missing})
    return missing


async def _create(client: AIOKafkaAdminClient, topics: dict[str, tuple[int, int]]) -> None:
    new = [
        NewTopic(name, partitions, 1, topic_configs={"max.message.bytes": str(size)})
        for name, (partitions, size) in topics.items()
    ]
    try:
        await client.create_topics(new)
    except TopicAlreadyExistsError:
        return  # somebody else was quicker
