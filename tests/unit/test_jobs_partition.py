"""What cannot be provoked on a real broker: a partition of the jobs topic that is lost, fails or breaks in the middle."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
from aiokafka import TopicPartition
from aiokafka.errors import CommitFailedError, OffsetOutOfRangeError, RecordTooLargeError
from structlog.testing import capture_logs

from batch_consumer import jobs_session
from batch_consumer.jobs_partition import JobsPartition, JobsParts
from batch_consumer.jobs_session import JobsSession
from batch_consumer.metrics import Metrics
from serving.errors import DependencyDown
from serving.settings import ConsumerSettings, KafkaSettings
from tests.housekeeping import until

TP = TopicPartition("twodoor.jobs", 0)


@dataclass
class Message:
    """One of aiokafka's records, as far as it matters here."""

    offset: int
    topic: str = TP.topic
    partition: int = TP.partition
    value: bytes = b"{}"


@dataclass
class FakeKafka:
    """aiokafka's consumer, and the broker's offsets of the group."""

    position: int = 0
    end: int = 10
    error: Exception | None = None
    sought: list[int] = field(default_factory=list)

    def seek(self, _: TopicPartition, offset: int) -> None:
        self.sought.append(offset)

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, self.end)

    async def commit(self, offsets: dict[TopicPartition, Any]) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.position = offsets[TP].offset

    async def committed(self, _: TopicPartition) -> tuple[int, str]:
        return self.position, ""

    def assignment(self) -> set[TopicPartition]:
        return {TP}


class Taken:
    """The offsets that were brought to their end; ``error`` is raised once."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.error: Exception | None = None
        self.tries = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, message: Message) -> None:
        self.tries += 1
        if self.error is not None:
            raise self.error
        await self.may_end.wait()
        self.offsets.append(message.offset)


@pytest.fixture(autouse=True)
def _plain_logs() -> None:
    structlog.reset_defaults()


@asynccontextmanager
async def owned(kafka: FakeKafka, taken: Taken) -> AsyncIterator[JobsPartition]:
    broker: Any = kafka
    settings = ConsumerSettings(retry_backoff_max_s=0.02)
    partition = JobsPartition(TP, kafka, JobsParts(KafkaSettings(), settings, broker, Metrics(), taken))
    task = asyncio.create_task(partition.run())
    try:
        await until(lambda: partition.is_open, "open")
        yield partition
    finally:
        await partition.drain(task, 2)
        assert task.done()


async def test_a_commit_that_fails_because_the_group_moved_on_is_dropped_and_the_place_looked_up_again() -> None:
    kafka, taken = FakeKafka(), Taken()
    async with owned(kafka, taken) as partition:
        partition.give([Message(0), Message(1)])
        await until(lambda: kafka.position == 2, "both committed")
        kafka.error = CommitFailedError()
        kafka.end, before = 20, partition.opening
        partition.give([Message(2), Message(3)])
        await until(lambda: partition.opening > before and partition.is_open, "opened again")
        assert kafka.sought == [0, 2]
        assert partition.next_read == 2
        partition.give([Message(2)])
        await until(lambda: kafka.position == 3, "committed")
    assert taken.offsets == [0, 1, 2, 2]


async def test_a_record_waits_while_a_part_is_away_and_those_behind_it_keep_their_order() -> None:
    kafka, taken = FakeKafka(), Taken()
    with capture_logs() as logs:
        async with owned(kafka, taken) as partition:
            taken.error = DependencyDown("the ledger does not answer")
            partition.give([Message(0), Message(1)])
            await until(lambda: taken.tries > 3, "tried again")
            assert not partition.wants
            taken.error = None
            await until(lambda: kafka.position == 2, "committed")
    assert taken.offsets == [0, 1]
    assert [entry["event"] for entry in logs] == ["a job waits in its topic"]


async def test_an_error_nobody_foresaw_keeps_its_partition_and_is_logged_once() -> None:
    kafka, taken = FakeKafka(), Taken()
    with capture_logs() as logs:
        async with owned(kafka, taken) as partition:
            taken.error = KeyError("a bug")
            partition.give([Message(0)])
            await until(lambda: taken.tries > 3, "tried again")
    assert kafka.position == 0
    assert [entry["event"] for entry in logs] == ["a record fails"]


async def test_the_record_in_hand_is_finished_and_committed_when_the_partition_is_revoked() -> None:
    kafka, taken = FakeKafka(), Taken()
    taken.may_end.clear()
    async with owned(kafka, taken) as partition:
        partition.give([Message(0), Message(1)])
        await until(lambda: taken.tries == 1, "begun")
        asyncio.get_running_loop().call_later(0.05, taken.may_end.set)
    assert (taken.offsets, kafka.position) == ([0], 1)


@pytest.mark.parametrize(("error", "sought", "blocked"), [
    (OffsetOutOfRangeError({TP: 5}), [0, 0], False),
    (RecordTooLargeError(), [0, 0], True),
])  # fmt: skip
async def test_what_cannot_be_read_is_looked_up_again_or_stands_still_but_is_never_passed_over(
    error: Any, sought: list[int], blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobsSession, "_make_consumer", lambda *_: _Subscribed())
    kafka, taken = FakeKafka(), Taken()
    async with owned(kafka, taken) as partition:
        metrics = Metrics()
        session = jobs_session.JobsSession(JobsParts(KafkaSettings(), ConsumerSettings(), Any, metrics, taken), 1_024)  # type: ignore[arg-type]
        session._consumer = kafka
        before = partition.opening
        session._unreadable(TP, partition, error)
        assert not partition.wants
        if blocked:
            await asyncio.sleep(0.05)
            assert not partition.wants
        else:
            await until(lambda: partition.opening > before and partition.wants, "opened again")
    assert kafka.sought == sought


async def test_a_rebalance_that_does_not_end_ends_the_session_so_that_a_new_one_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(JobsSession, "_make_consumer", lambda *_: _Subscribed())
    short: dict[str, Any] = {"drain_timeout_s": 0.01, "kafka_timeout_s": 0.02, "kafka_check_interval_s": 0.01}
    parts = JobsParts(KafkaSettings(), ConsumerSettings(**short), Any, Metrics(), Taken())  # type: ignore[arg-type, call-arg]
    session = JobsSession(parts, 1_024)
    running = asyncio.create_task(session.run(asyncio.Event()))
    await session.on_partitions_revoked(set())
    await session.on_partitions_assigned(set())
    await asyncio.sleep(4 * session._join_limit_s)
    assert not running.done()
    await session.on_partitions_revoked(set())
    with pytest.raises(TimeoutError, match="does not end"):
        await asyncio.wait_for(running, 5)


class _Subscribed:
    def subscribe(self, topics: list[str], listener: object) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def getmany(self, *_: Any, **__: Any) -> dict[TopicPartition, Any]:
        await asyncio.sleep(0.01)
        return {}
