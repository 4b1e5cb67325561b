"""Jobs through the real consumer, a real ledger and a real model: one line a row, whatever is killed or away meanwhile."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from batch_consumer import chunks
from batch_consumer.chunk import Chunk
from batch_consumer.rows import Outcome
from jobs.intake import Submitter
from jobs.objects import Objects, open_objects
from jobs.postgres import PostgresLedger, open_ledger
from jobs.records import Job
from jobs.states import Status
from serving.pipeline import Pipeline
from serving.registry import Registry
from serving.settings import JobsSettings, ModelSettings, TritonSettings
from serving.triton_client import TritonClient
from tests.conftest import PostgresFactory
from tests.integration.consumer_parts import Consumer, Topics
from tests.parts import Triton, free_ports
from tests.stubs import FAIL, NAN, STUB, stub_score
from tests.unit.job_house import House, result_lines, submit

ROWS = [f"a fine film number {index}" for index in range(400)]
NOWHERE = Topics("none.requests", "none.results", "none.dlq", "none")


def jobs_settings(database_url: str, folder: Path, **more: Any) -> JobsSettings:
    return JobsSettings(database_url=database_url, objects_url=folder.as_uri(), **more)


@pytest_asyncio.fixture
async def ledger(database_url: str, tmp_path: Path) -> AsyncIterator[PostgresLedger]:
    async with open_ledger(jobs_settings(database_url, tmp_path)) as opened:
        yield opened


@pytest.fixture
def objects(database_url: str, tmp_path: Path) -> Objects:
    return open_objects(jobs_settings(database_url, tmp_path))


def make_consumer(triton: Triton, database_url: str, folder: Path, **settings: object) -> Consumer:
    """Return a consumer (not started) whose Kafka is away: jobs do not need it."""
    (nobody,) = free_ports(1)
    return Consumer(
        folder, f"127.0.0.1:{nobody}", triton.grpc_address, triton.repository, NOWHERE,
        TWODOOR_JOBS_DATABASE_URL=database_url, TWODOOR_JOBS_OBJECTS_URL=folder.as_uri(),
        TWODOOR_CONSUMER_LEASE_S="1.5", TWODOOR_CONSUMER_LEASE_RENEWAL_S="0.3", TWODOOR_CONSUMER_DUTY_INTERVAL_S="0.2",
        TWODOOR_CONSUMER_CLAIM_INTERVAL_MS="50", TWODOOR_CONSUMER_KAFKA_TIMEOUT_S="2", **settings,
    )  # fmt: skip


async def ended(ledger: PostgresLedger, job: Job, timeout_s: float = 30.0) -> Job:
    """Wait until the job has ended; closing it is the consumer's business."""
    async with asyncio.timeout(timeout_s):
        while not (found := await ledger.get(job.tenant, job.id)).status.ended:
            await asyncio.sleep(0.05)
    return found


async def assert_right(ledger: Any, objects: Objects, job: Job, texts: Sequence[str]) -> None:
    lines = await result_lines(ledger, objects, job)
    assert [line["index"] for line in lines] == list(range(len(texts)))
    wrong = [
        line for line, text in zip(lines, texts, strict=True) if abs(line["output"]["score"] - stub_score(text)) > 1e-3
    ]
    assert wrong == []


@pytest.mark.timeout(60)
async def test_a_job_runs_by_itself_without_kafka_and_sigterm_ends_the_consumer_in_order(
    triton: Triton, database_url: str, ledger: PostgresLedger, objects: Objects, tmp_path: Path
) -> None:
    consumer = make_consumer(triton, database_url, tmp_path).start()
    try:
        texts = [*ROWS, f"one {NAN} row", f"one {FAIL} row"]
        job = await submit(ledger, objects, texts, model=STUB, chunk_rows=100)
        done = await ended(ledger, job)
        assert done.status is Status.COMPLETED
        lines = await result_lines(ledger, objects, done)
        codes = {line["index"]: line["error"]["code"] for line in lines if "error" in line}
        assert codes == {400: "non_finite_output", 401: "model_failed"}
        assert consumer.ready() == {"triton": "up", "kafka": "down", "postgres": "up", "objects": "up"}
        assert consumer.count(f'twodoor_rows_total{{lane="bulk",model="{STUB}",outcome="ok"}}') == 400
        assert await asyncio.to_thread(consumer.stop) == 0
        assert "Traceback" not in consumer.log()
        assert not (await ledger.bulk_state(60.0)).consumers
    finally:
        consumer.kill()


@pytest.mark.timeout(90)
async def test_a_kill_at_any_moment_leaves_one_line_for_each_row(
    triton: Triton, database_url: str, ledger: PostgresLedger, objects: Objects, tmp_path: Path
) -> None:
    async def killed_at(moment: str) -> None:
        crash = {"TWODOOR_TEST_CRASHPOINT": moment, "TWODOOR_CONSUMER_MAX_CHUNKS": 2}
        consumer = make_consumer(triton, database_url, tmp_path, **crash).launch()
        try:
            code = await asyncio.to_thread(consumer.child.wait, 40)
            assert code == -signal.SIGKILL, f"{moment} was not reached:\n{consumer.log()}"
        finally:
            consumer.kill()

    job = await submit(ledger, objects, ROWS, model=STUB, chunk_rows=20)
    # Side by side over one job, and an heir that begins with what they have left and dies when it has closed the job.
    moments = ["after_claim:2", "before_infer:2", "after_part_put:2", "after_complete:2"]
    await asyncio.gather(*map(killed_at, moments))
    await killed_at("after_close:1")
    done = await ended(ledger, job, timeout_s=1.0)
    assert (done.status, done.rows_succeeded) == (Status.COMPLETED, len(ROWS))
    await assert_right(ledger, objects, done, ROWS)


@asynccontextmanager
async def house(triton: Triton, ledger: Any, objects: Objects, **settings: Any) -> AsyncIterator[House]:
    """Run a consumer's job door in this process, over real parts."""
    async with AsyncExitStack() as stack:
        triton_settings = TritonSettings(grpc_address=triton.grpc_address, poll_interval_s=0.2)  # type: ignore[call-arg]
        client = await stack.enter_async_context(TritonClient(triton_settings))
        registry = Registry(client, ModelSettings(repository=triton.repository), triton_settings)  # type: ignore[call-arg]
        following = asyncio.create_task(registry.run())
        await registry.seen.wait()
        made = House(Pipeline(client), ledger, objects, registry=registry, **settings)
        try:
            async with made.running():
                yield made
        finally:
            following.cancel()
            await asyncio.wait([following])


async def closing(ledger: PostgresLedger, job: Job, timeout_s: float = 30.0) -> Job:
    async with asyncio.timeout(timeout_s):
        while True:
            await ledger.close_due(100)
            if (found := await ledger.get(job.tenant, job.id)).status.ended:
                return found
            await asyncio.sleep(0.02)


async def test_a_small_job_behind_a_giant_one_takes_at_most_three_times_its_idle_time(
    triton: Triton, ledger: PostgresLedger, objects: Objects
) -> None:
    async with house(triton, ledger, objects, claim_interval_ms=50, lease_renewal_s=0.5) as door:
        idle = []
        for _ in range(3):
            began_s = time.monotonic()
            await closing(ledger, await submit(ledger, objects, ROWS[:50], model=STUB))
            idle.append(time.monotonic() - began_s)
        giant = await submit(ledger, objects, ROWS * 50, model=STUB, chunk_rows=512)
        async with asyncio.timeout(20):
            while door.lane.progress < 1_000:
                await asyncio.sleep(0.01)
        began_s = time.monotonic()
        await closing(ledger, await submit(ledger, objects, ROWS[:50], model=STUB))
        behind = time.monotonic() - began_s
        assert not (await ledger.get(giant.tenant, giant.id)).status.ended
        # Half a second for what a busy machine adds to times of a tenth of that.
        assert behind <= 3 * sorted(idle)[1] + 0.5, (behind, idle)
        await ledger.cancel(giant.tenant, giant.id)
        await closing(ledger, giant)


async def test_a_cancelled_job_costs_the_model_nothing_after_one_renewal(
    triton: Triton, ledger: PostgresLedger, objects: Objects
) -> None:
    async with house(triton, ledger, objects, lease_renewal_s=0.3) as door:
        job = await submit(ledger, objects, ROWS * 25, model=STUB, chunk_rows=512)
        async with asyncio.timeout(20):
            while door.lane.progress < 500:
                await asyncio.sleep(0.01)
        await ledger.cancel(job.tenant, job.id)
        async with asyncio.timeout(0.3 + 1.0):
            while any(chunk.alive for chunk in door.leases.chunks.values()):
                await asyncio.sleep(0.01)
        done = await closing(ledger, job)
        assert done.status is Status.CANCELLED
        lines = await result_lines(ledger, objects, done)
        assert [line["index"] for line in lines] == list(range(len(ROWS) * 25))
        assert 500 <= done.rows_succeeded < len(lines)


@pytest.mark.timeout(90)
async def test_postgres_killed_under_a_job_costs_nothing_but_time(
    triton: Triton, postgres_factory: PostgresFactory, tmp_path: Path
) -> None:
    server = postgres_factory()
    settings = jobs_settings(server.new_database(), tmp_path, database_timeout_s=1.0)
    objects = open_objects(settings)
    async with open_ledger(settings) as ledger, house(triton, ledger, objects, lease_s=2.0) as door:
        job = await submit(ledger, objects, ROWS * 5, model=STUB, chunk_rows=100)
        async with asyncio.timeout(20):
            while door.lane.progress < 300:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(server.kill)
        async with asyncio.timeout(20):
            while door.leases.is_up or door.lane.has_work():
                await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)  # longer than the lease: whoever comes back first decides
        await asyncio.to_thread(server.start)
        done = await closing(ledger, job)
        assert (done.status, done.rows_succeeded) == (Status.COMPLETED, 5 * len(ROWS))
        await assert_right(ledger, objects, done, ROWS * 5)
        assert door.sample("twodoor_leases_lost_total") == 0
        assert door.lane.progress == 5 * len(ROWS)
        server.kill()


async def test_tenants_with_weights_one_and_three_get_rows_in_that_ratio(
    triton: Triton, ledger: PostgresLedger, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: Counter[str] = Counter()

    class Counted(Chunk):
        def finish(self, index: int, outcome: Outcome) -> None:
            answered[self.claim.tenant] += 1
            super().finish(index, outcome)

    monkeypatch.setattr(chunks, "Chunk", Counted)
    tenants = [Submitter("light", 1.0), Submitter("heavy", 3.0)]
    jobs = [await submit(ledger, objects, ROWS * 25, one, model=STUB, chunk_rows=512) for one in tenants]
    # Small requests one at a time: the model has to be what there is too little of.
    slow = {"max_in_flight": 1, "max_microbatch_rows": 4}
    async with house(triton, ledger, objects, claim_interval_ms=50, lease_renewal_s=0.5, **slow):
        async with asyncio.timeout(60):
            while len(answered) < 2:
                await asyncio.sleep(0.02)
            begun = answered.copy()
            while answered.total() < begun.total() + 3_000:
                await asyncio.sleep(0.02)
        got = answered - begun
        assert got["heavy"] / got["light"] == pytest.approx(3.0, rel=0.1)
        for job in jobs:
            await ledger.cancel(job.tenant, job.id)
