"""What the consumer's tests share: topics of one's own, the real process, a producer and a plain reader."""

import asyncio
import json
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from tests.parts import Process, answers, free_ports, wait_until

PARTITIONS = 3


@dataclass(frozen=True, slots=True)
class Topics:
    """The three topics and the group of one test."""

    requests: str
    results: str
    dlq: str
    group: str

    def settings(self) -> dict[str, str]:
        """Return them as settings of a consumer."""
        return {
            "TWODOOR_KAFKA_REQUESTS_TOPIC": self.requests,
            "TWODOOR_KAFKA_RESULTS_TOPIC": self.results,
            "TWODOOR_KAFKA_DLQ_TOPIC": self.dlq,
            "TWODOOR_CONSUMER_GROUP_ID": self.group,
        }


@dataclass(frozen=True, slots=True)
class ToSend:
    """One record for a request topic."""

    value: bytes | None
    key: bytes | None = None
    partition: int | None = None
    headers: Sequence[tuple[str, bytes]] = field(default_factory=tuple)


async def make_topics(kafka: str, configs: Mapping[str, str] | None = None) -> Topics:
    """Create topics with names of their own; ``configs`` are those of the request topic."""
    name = uuid.uuid4().hex[:8]
    topics = Topics(f"t{name}.requests", f"t{name}.results", f"t{name}.dlq", f"g{name}")
    await create(kafka, topics.requests, dict(configs or {}))
    await create(kafka, topics.results, {})
    await create(kafka, topics.dlq, {})
    return topics


async def create(kafka: str, topic: str, configs: dict[str, str]) -> None:
    """Create one topic."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        answer = await admin.create_topics([NewTopic(topic, PARTITIONS, 1, topic_configs=configs)])
        assert [error[1] for error in answer.topic_errors] == [0]
    finally:
        await admin.close()


def request(identifier: str, text: object = "a fine film", model: str = "stub_faulty", **more: object) -> bytes:
    """Return a JSON record."""
    return json.dumps({"id": identifier, "model": model, "text": text, **more}).encode()


async def produce(kafka: str, topic: str, records: Iterable[ToSend | bytes], compression: str | None = None) -> None:
    """Send records; those without a partition go round, so that each partition gets its share in order."""
    async with AIOKafkaProducer(
        bootstrap_servers=kafka, enable_idempotence=True, linger_ms=5, compression_type=compression,
        max_request_size=8 * 2**20,
    ) as producer:  # fmt: skip
        sent = []
        for index, record in enumerate(records):
            one = record if isinstance(record, ToSend) else ToSend(record)
            partition = index % PARTITIONS if one.partition is None else one.partition
            sent.append(
                await producer.send(
                    topic, one.value, key=one.key or b"k", partition=partition, headers=list(one.headers)
                )
            )
        await asyncio.wait_for(asyncio.gather(*sent), 60)


async def read(kafka: str, topic: str, enough: Callable[[list[Any]], bool], timeout_s: float = 60.0) -> list[Any]:
    """Read a topic from its beginning as any program would: read_committed, no group, nothing deduplicated.

    Returns once ``enough`` is true and nothing more has come for a while; fails after ``timeout_s``.
    """
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka, isolation_level="read_committed", enable_auto_commit=False,
        auto_offset_reset="earliest",
    )  # fmt: skip
    await consumer.start()
    found: list[Any] = []
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    quiet = 0
    try:
        while not enough(found) or quiet < 3:
            batches = await consumer.getmany(timeout_ms=300)
            quiet = 0 if batches else quiet + 1
            for messages in batches.values():
                found += messages
            assert loop.time() < end_s, f"only {len(found)} records in {topic} after {timeout_s:g} s"
    finally:
        await consumer.stop()
    return sorted(found, key=lambda message: (message.partition, message.offset))


async def results(kafka: str, topics: Topics, count: int, timeout_s: float = 60.0) -> list[dict[str, Any]]:
    """Return ``count`` JSON results (more, if there are more), in order within each partition."""
    messages = await read(kafka, topics.results, lambda found: len(found) >= count, timeout_s)
    return [json.loads(message.value) for message in messages]


def assert_each_once(found: Sequence[Mapping[str, Any]], ids: Iterable[str]) -> None:
    """Each id has exactly one result, and the results of each source partition come in its offset order."""
    counts = Counter(result["id"] for result in found)
    expected = set(ids)
    assert {name for name in expected if name not in counts} == set(), "results missing"
    assert {name: number for name, number in counts.items() if number != 1 or name not in expected} == {}
    for partition in range(PARTITIONS):
        offsets = [r["source"]["offset"] for r in found if r["source"]["partition"] == partition]
        assert offsets == sorted(offsets), f"results of partition {partition} are out of order"


class Consumer(Process):
    """A real ``python -m batch_consumer`` with timeouts that suit a test."""

    def __init__(
        self, folder: Path, kafka: str, triton: str, repository: Path, topics: Topics, **settings: object
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        env = {
            "TWODOOR_CONSUMER_PORT": str(self.port),
            "TWODOOR_KAFKA_BOOTSTRAP_SERVERS": kafka,
            "TWODOOR_TRITON_GRPC_ADDRESS": triton,
            "TWODOOR_TRITON_POLL_INTERVAL_S": "0.2",
            "TWODOOR_MODELS_REPOSITORY": str(repository),
            "TWODOOR_CONSUMER_SESSION_TIMEOUT_MS": "6000",
            "TWODOOR_CONSUMER_KAFKA_CHECK_INTERVAL_S": "0.5",
            "TWODOOR_CONSUMER_COMMIT_INTERVAL_MS": "200",
            "TWODOOR_CONSUMER_KAFKA_TIMEOUT_S": "5",
            "TWODOOR_CONSUMER_RETRY_BACKOFF_MAX_S": "1",
            **topics.settings(),
            **{name: str(value) for name, value in settings.items()},
        }
        super().__init__([sys.executable, "-m", "batch_consumer"], env, folder / f"consumer-{self.port}.log")

    def start(self) -> Self:
        """Start it and wait until it answers."""
        super().start()
        wait_until(lambda: self.child.poll() is not None or answers(f"{self.url}/healthz"), "consumer alive")
        assert self.child.poll() is None, self.log()
        return self

    def launch(self) -> Self:
        """Start it and wait for nothing."""
        return super().start()

    def ready(self) -> dict[str, str]:
        """Return the dependencies as /readyz shows them."""
        response = httpx.get(f"{self.url}/readyz", timeout=5)
        assert response.status_code == 200
        found: dict[str, str] = response.json()["dependencies"]
        return found

    def healthy(self) -> bool:
        """Return whether /healthz says that it lives."""
        return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics by its name with labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=5).text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def count(self, name: str) -> float:
        """Return one sample, 0 where it does not exist."""
        return self.metrics().get(name, 0.0)
