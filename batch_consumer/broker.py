"""Questions to Kafka that are asked outside the fetch loop: committed offsets, limits of topics, is it there at all."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from batch_consumer.bootstrap import ends_by_itself
from serving.errors import DependencyDown
from serving.settings import ConsumerSettings, KafkaSettings

Trouble = (KafkaError, OSError, TimeoutError, AssertionError)
"""What aiokafka raises when a broker is away or fences us; its state machines refuse a step with an assertion."""

_MAX_MESSAGE_BYTES = "max.message.bytes"


class Broker:
    """An admin client that is made at first use and made anew after any trouble."""

    def __init__(self, kafka: KafkaSettings, settings: ConsumerSettings) -> None:
        self._kafka = kafka
        self._timeout_s = settings.kafka_timeout_s
        self._group_id = settings.group_id
        self._admin: Any = None
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """Close the connection."""
        await self._discard(self._admin)

    async def _discard(self, admin: Any) -> None:
        """Close one client; another that has taken its place meanwhile, for others to use, stays."""
        if self._admin is admin:
            self._admin = None
        if admin is not None:
            with suppress(*Trouble):
                async with asyncio.timeout(self._timeout_s):
                    await admin.close()

    async def _started(self) -> Any:
        admin: Any = AIOKafkaAdminClient(
            bootstrap_servers=self._kafka.bootstrap_servers,
            client_id="twodoor-consumer-admin",
            request_timeout_ms=int(self._timeout_s * 1000),
        )
        ends_by_itself(admin._client)
        try:
            async with asyncio.timeout(self._timeout_s):
                await admin.start()
        except BaseException:
            await self._discard(admin)
            raise
        return admin

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        """Yield a started client; whatever goes wrong becomes DependencyDown."""
        admin: Any = None
        try:
            async with self._lock:
                if self._admin is None:
                    self._admin = await self._started()
                admin = self._admin
            async with asyncio.timeout(self._timeout_s):
                yield admin
        except Trouble as exc:
            await self._discard(admin)
            raise DependencyDown(f"Kafka does not answer: {type(exc).__name__} {exc}") from exc

    async def ping(self) -> None:
        """Ask for the cluster's metadata; raises DependencyDown."""
        async with self._client() as admin:
            await admin.list_topics()

    async def committed(self, partition: TopicPartition) -> tuple[int | None, str]:
        """Return the group's committed offset (None where there is none) and its metadata; raises DependencyDown.

        A group coordinator that is still loading answers without the partition, and aiokafka's own ``committed()``
        takes that for "nothing committed": every record would be worked on again. Here it is an error.
        """
        async with self._client() as admin:
            found = await admin.list_consumer_group_offsets(self._group_id, partitions=[partition])
            if partition not in found:
                raise KafkaError("the group's coordinator is not ready")
        offset, metadata = found[partition]
        return (None, "") if offset < 0 else (offset, metadata or "")

    async def max_message_bytes(self, topics: Sequence[str]) -> dict[str, int]:
        """Return each topic's max.message.bytes; raises DependencyDown, also where a topic does not exist."""
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in topics]
        limits: dict[str, int] = {}
        async with self._client() as admin:
            for answer in await admin.describe_configs(resources):
                for error_code, _, _, name, entries in answer.resources:
                    if error_code:
                        raise KafkaError(f"topic {name} cannot be described")
                    limits[name] = next(int(entry[1]) for entry in entries if entry[0] == _MAX_MESSAGE_BYTES)
        return limits

    async def partition_counts(self, topics: Sequence[str]) -> dict[str, int]:
        """Return each topic's number of partitions; raises DependencyDown, also where a topic does not exist."""
        async with self._client() as admin:
            described = await admin.describe_topics(list(topics))
            counts = {topic["topic"]: len(topic["partitions"]) for topic in described if not topic["error_code"]}
            if missing := set(topics) - counts.keys():
                raise KafkaError(f"no topic {', '.join(sorted(missing))}")
        return counts
