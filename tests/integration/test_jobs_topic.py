"""The door topic of jobs over real Kafka, PostgreSQL and a folder: accepted means kept, refused is told, nothing is lost."""

import asyncio
import json
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError
from structlog.testing import capture_logs

from batch_consumer.broker import Broker
from batch_consumer.events import Events
from batch_consumer.jobs_topic import JobsTopic
from batch_consumer.sweep import Orphans
from jobs.intake import JobIntake
from jobs.objects import open_objects
from jobs.postgres import open_ledger
from serving.settings import ConsumerSettings, JobsSettings, KafkaSettings
from tests.conftest import PostgresFactory
from tests.housekeeping import ROWS, House, running, until
from tests.integration.consumer_parts import PARTITIONS, Consumer, Topics, ToSend, create, make_topics, produce, read

TENANT = "t"
INPUTS = [f"row {index}" for index in range(ROWS)]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True, slots=True)
class JobTopics:
    """The three topics of jobs and the group of one test."""

    kafka: KafkaSettings
    consumer: ConsumerSettings
    jobs: JobsSettings

    @property
    def group(self) -> str:
        return f"{self.consumer.group_id}.jobs"


async def make_job_topics(kafka: str, database_url: str, folder: Path, **more: Any) -> JobTopics:
    name = uuid.uuid4().hex[:8]
    names = {"jobs_topic": f"j{name}", "jobs_events_topic": f"j{name}.events", "jobs_dlq_topic": f"j{name}.dlq"}
    for topic in names.values():
        await create(kafka, topic, {})
    consumer: dict[str, Any] = {
        "group_id": f"g{name}", "jobs_tenant": TENANT, "retry_backoff_max_s": 0.2, "kafka_check_interval_s": 0.3,
        "session_timeout_ms": 6_000, "duty_interval_s": 0.05,
    }  # fmt: skip
    return JobTopics(
        KafkaSettings(bootstrap_servers=kafka, **names),
        ConsumerSettings(**(consumer | more)),
        JobsSettings(database_url=database_url, objects_url=folder.as_uri(), database_timeout_s=1),
    )


@asynccontextmanager
async def opened(topics: JobTopics) -> AsyncIterator[tuple[House, Events]]:
    """A house over the real stores, and the events topic."""
    structlog.reset_defaults()
    broker = Broker(topics.kafka, topics.consumer)
    events = Events(topics.kafka, topics.consumer, broker)
    try:
        async with open_ledger(topics.jobs) as ledger:
            yield House(ledger, open_objects(topics.jobs)), events
    finally:
        await events.close()
        await broker.close()


@asynccontextmanager
async def reading(topics: JobTopics, house: House, events: Events) -> AsyncIterator[None]:
    """A jobs topic that is read while the block runs; it must end in order."""
    intake = JobIntake(house.ledger, house.objects, topics.jobs)
    door = JobsTopic(topics.kafka, topics.consumer, topics.jobs, intake, events, house.metrics)
    stop = asyncio.Event()
    task = asyncio.create_task(door.run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 15)


def _body(**more: Any) -> bytes:
    return json.dumps({"model": "m", "inputs": INPUTS} | more).encode()


async def _jobs(house: House) -> int:
    return len((await house.ledger.list_jobs(TENANT, None, None, 100)).jobs)


async def _has_jobs(house: House, count: int) -> bool:
    return await _jobs(house) == count


async def _committed(topics: JobTopics) -> dict[int, int]:
    """Partition → committed offset of the group."""
    admin = AIOKafkaAdminClient(bootstrap_servers=topics.kafka.bootstrap_servers)
    await admin.start()
    try:
        partitions = [TopicPartition(topics.kafka.jobs_topic, number) for number in range(PARTITIONS)]
        found = await admin.list_consumer_group_offsets(topics.group, partitions=partitions)
        return {partition.partition: offset.offset for partition, offset in found.items()}
    finally:
        await admin.close()


async def _all_committed(topics: JobTopics, count: int) -> bool:
    try:
        offsets = await _committed(topics)
    except GroupCoordinatorNotAvailableError:  # a broker that has just started
        return False
    return sum(max(0, offset) for offset in offsets.values()) == count


async def _events(topics: JobTopics, count: int) -> list[dict[str, Any]]:
    """Events in the order of one job's, or of one partition's."""
    kafka = topics.kafka
    found = await read(kafka.bootstrap_servers, kafka.jobs_events_topic, lambda found: len(found) >= count, 20)
    return [json.loads(message.value) for message in found]


async def test_a_record_becomes_a_job_whose_acceptance_and_end_are_told_and_a_bad_one_is_refused(
    kafka: str, database_url: str, tmp_path: Path
) -> None:
    topics = await make_job_topics(kafka, database_url, tmp_path)
    (tmp_path / "imports" / TENANT).mkdir(parents=True)
    (tmp_path / "imports" / TENANT / "rows.jsonl").write_bytes(b'"a row"\n' * ROWS)
    imported = json.dumps({"model": "m", "input_object": f"imports/{TENANT}/rows.jsonl"}).encode()
    bad = [b"{nonsense", _body(colour="red"), _body(inputs=[]), imported.replace(b"rows", b"other")]
    records = [
        ToSend(_body(), key=b"mine", partition=0, headers=[("traceparent", TRACE.encode())]),
        ToSend(_body(), partition=1, headers=[("idempotency-key", b"twice")]),
        ToSend(_body(), partition=1, headers=[("idempotency-key", b"twice")]),
        ToSend(_body(truncate=True), partition=1, headers=[("idempotency-key", b"twice")]),
        ToSend(imported, partition=2),
        ToSend(None, partition=2),
        *(ToSend(body, key=b"bad", partition=2, headers=[("traceparent", TRACE.encode())]) for body in bad),
    ]
    async with opened(topics) as (house, events):
        house.told = events  # type: ignore[assignment]
        await produce(kafka, topics.kafka.jobs_topic, records)
        async with reading(topics, house, events), running(house.make()):
            await until(lambda: _all_committed(topics, len(records)), "all are at their end")
            assert await _jobs(house) == 3
            for _ in range(3):
                await house.work(await house.claim())
            told = await _events(topics, 3 + 3 + 5)
        by_event: dict[str, list[dict[str, Any]]] = {"accepted": [], "ended": [], "refused": []}
        for event in told:
            by_event[event["event"]].append(event)
        assert {event["status"] for event in by_event["accepted"]} == {"queued"}
        assert [event["rows"]["succeeded"] for event in by_event["ended"]] == [ROWS] * 3
        assert {event["source"]["partition"] for event in by_event["ended"]} == {0, 1, 2}
        codes = [event["code"] for event in by_event["refused"]]
        assert sorted(codes) == sorted(
            ["idempotency_mismatch", "invalid_json", "invalid_request", "empty_input", "invalid_request"]
        )
        skipped = house.metrics.render().decode()
        assert 'twodoor_records_skipped_total{reason="tombstone"} 1.0' in skipped
        assert 'twodoor_records_skipped_total{reason="refused_job"} 5.0' in skipped
    letters = await read(kafka, topics.kafka.jobs_dlq_topic, lambda found: len(found) >= 5, 20)
    assert {letter.value for letter in letters} == {*bad, _body(truncate=True)}
    headers = dict(next(letter.headers for letter in letters if letter.value == bad[0]))
    assert headers["twodoor-error-code"] == b"invalid_json"
    assert headers["twodoor-source-topic"] == topics.kafka.jobs_topic.encode()
    assert (headers["twodoor-source-partition"], headers["twodoor-source-offset"]) == (b"2", b"2")
    assert headers["traceparent"] == TRACE.encode()


async def test_a_kill_between_acceptance_and_commit_gives_the_same_job_again(
    kafka: str, database_url: str, tmp_path: Path
) -> None:
    topics = await make_job_topics(kafka, database_url, tmp_path)
    names = await make_topics(kafka)
    settings = {
        "TWODOOR_JOBS_DATABASE_URL": database_url, "TWODOOR_JOBS_OBJECTS_URL": tmp_path.as_uri(),
        "TWODOOR_KAFKA_JOBS_TOPIC": topics.kafka.jobs_topic, "TWODOOR_CONSUMER_JOBS_TENANT": TENANT,
        "TWODOOR_KAFKA_JOBS_EVENTS_TOPIC": topics.kafka.jobs_events_topic,
        "TWODOOR_KAFKA_JOBS_DLQ_TOPIC": topics.kafka.jobs_dlq_topic, "TWODOOR_CONSUMER_KAFKA_TIMEOUT_S": 3,
    }  # fmt: skip
    same_group = Topics(names.requests, names.results, names.dlq, topics.consumer.group_id)
    await produce(kafka, topics.kafka.jobs_topic, [ToSend(_body(), partition=0) for _ in range(3)])
    folder = tmp_path / "consumer"
    crash = {"TWODOOR_TEST_CRASHPOINT": "after_job_accept:2"}
    first = Consumer(folder, kafka, "127.0.0.1:9", tmp_path, same_group, **settings, **crash).launch()
    try:
        assert await asyncio.to_thread(first.child.wait, 60) == -signal.SIGKILL, first.log()
    finally:
        first.kill()
    assert (await _committed(topics))[0] == 1
    async with opened(topics) as (house, events):
        assert await _jobs(house) == 2
        async with reading(topics, house, events):
            await until(lambda: _all_committed(topics, 3), "all are at their end", 30)
        assert await _jobs(house) == 3


@pytest.mark.timeout(90)
async def test_with_postgres_away_records_wait_in_order_the_group_is_kept_and_nothing_is_lost(
    kafka: str, postgres_factory: PostgresFactory, tmp_path: Path
) -> None:
    server = postgres_factory()
    # The group's patience with a consumer that does not poll is shorter than the outage.
    topics = await make_job_topics(kafka, server.new_database(), tmp_path, max_poll_interval_ms=1_500)
    async with opened(topics) as (house, events):
        with capture_logs() as logs:
            async with reading(topics, house, events):
                await produce(kafka, topics.kafka.jobs_topic, [ToSend(_body(), partition=0)])
                await until(lambda: _has_jobs(house, 1), "the first")
                server.freeze()
                try:
                    bodies = [_body(metadata={"n": str(n)}) for n in range(3)]
                    await produce(kafka, topics.kafka.jobs_topic, [ToSend(body, partition=0) for body in bodies])
                    await until(lambda: house.metrics.retries.labels("dependency_down")._value.get() >= 2, "it waits")
                finally:
                    server.thaw()
                await until(lambda: _has_jobs(house, 4), "all")
                await until(lambda: _all_committed(topics, 4), "committed")
        jobs = (await house.ledger.list_jobs(TENANT, None, None, 10)).jobs
        assert [job.metadata.get("n") for job in jobs] == ["2", "1", "0", None]
    assert sum(entry["event"] == "partitions of jobs assigned" for entry in logs) == 1
    assert sum(entry["event"] == "a job waits in its topic" for entry in logs) == 1
    server.kill()


async def test_an_offset_that_no_longer_exists_is_told_once_with_its_gap_and_no_record_is_passed_over(
    kafka: str, database_url: str, tmp_path: Path
) -> None:
    topics = await make_job_topics(kafka, database_url, tmp_path)
    await produce(kafka, topics.kafka.jobs_topic, [ToSend(_body(), partition=0) for _ in range(3)])
    partition = TopicPartition(topics.kafka.jobs_topic, 0)
    other = AIOKafkaConsumer(bootstrap_servers=kafka, group_id=topics.group, enable_auto_commit=False)
    await other.start()
    other.assign([partition])
    await other.commit({partition: 10**6})
    await other.stop()
    async with opened(topics) as (house, events):
        with capture_logs() as logs:
            async with reading(topics, house, events):
                await until(lambda: _has_jobs(house, 3), "all three")
                await until(lambda: _all_committed(topics, 3), "committed")
        (lost,) = [entry for entry in logs if entry["event"] == "offsets lost"]
        assert lost["gap"] == 10**6 - 3
        assert b"twodoor_offsets_lost_total 1.0" in house.metrics.render()


async def test_a_second_consumer_that_joins_and_leaves_makes_no_job_twice(
    kafka: str, database_url: str, tmp_path: Path
) -> None:
    topics = await make_job_topics(kafka, database_url, tmp_path)
    async with opened(topics) as (house, events):
        async with reading(topics, house, events):
            await produce(kafka, topics.kafka.jobs_topic, [_body() for _ in range(30)])
            async with reading(topics, house, events):
                await produce(kafka, topics.kafka.jobs_topic, [_body() for _ in range(30)])
            await until(lambda: _all_committed(topics, 60), "all are at their end", 30)
        assert await _jobs(house) == 60


async def test_over_postgres_and_a_folder_too_exactly_what_nobody_can_need_is_swept(
    kafka: str, database_url: str, tmp_path: Path
) -> None:
    topics = await make_job_topics(kafka, database_url, tmp_path)
    async with opened(topics) as (house, _):
        needed, orphans = await house.scene(lambda: asyncio.sleep(0.25), lease_s=0.2)
        # What a killed writer left half written, beside an object that is needed and one that is not.
        half = {f"{next(iter(orphans))}#1"}
        kept = {f"{next(iter(needed))}#1"}
        for key in half | kept:
            (tmp_path / key).write_bytes(b"")
        sweep = Orphans(house.ledger, house.objects, 60, lambda: datetime.now(UTC) + timedelta(seconds=120))
        assert await sweep.sweep(lambda: True)
        assert await house.keys() == needed | kept


async def test_a_job_s_end_is_not_taken_while_another_is_just_taking_its_acceptance(
    database_url: str, tmp_path: Path
) -> None:
    settings = JobsSettings(database_url=database_url, objects_url=tmp_path.as_uri())  # type: ignore[arg-type]
    async with (
        open_ledger(settings) as ledger,
        await psycopg.AsyncConnection.connect(database_url) as other,
    ):
        house = House(ledger, open_objects(settings))
        job = await house.accept()
        await house.work(await house.claim())
        await ledger.close_due(10)
        await other.execute("UPDATE twodoor.notifications SET lease_until = now() + '1 hour' WHERE kind = 'accepted'")
        # What the other one has done cannot be seen yet.
        assert await ledger.take_notifications("c1", 10, 60) == []
        await other.rollback()
        told = await ledger.take_notifications("c1", 10, 60)
        assert [(found.job.id, found.kind) for found in told] == [(job.id, "accepted"), (job.id, "ended")]
