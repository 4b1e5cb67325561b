"""Each duty of the housekeeper, and what must never happen while it clears away."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from batch_consumer.events import event_json
from batch_consumer.sweep import Orphans, empty
from jobs.ledger import input_key, job_prefix, part_key
from jobs.memory import MemoryLedger
from jobs.objects import ObjectInfo, memory_objects
from jobs.records import Job
from jobs.states import Status
from serving.errors import DependencyDown
from tests.housekeeping import ROWS, SOURCE, VERSION, Clock, House, running, until


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def house(clock: Clock) -> House:
    structlog.reset_defaults()
    return House(MemoryLedger(clock), memory_objects())


async def _status(house: House, job: Job, wanted: Status) -> bool:
    return (await house.ledger.get("t", job.id)).status is wanted


# -- closing, expiring, telling ---------------------------------------------------------------------------------------


async def test_a_job_without_open_chunks_is_closed_and_both_its_beginning_and_its_end_are_told(house: House) -> None:
    job = await house.accept(chunks=2)
    await house.work(await house.claim())
    last = await house.claim()
    with capture_logs() as logs:
        async with running(house.make()):
            await until(lambda: len(house.told.events) == 1, "the acceptance is told")
            assert await _status(house, job, Status.RUNNING)
            await house.work(last)
            await until(lambda: len(house.told.events) == 2, "the end is told")
    assert house.told.kinds() == [(job.id, "accepted"), (job.id, "ended")]
    ended = json.loads(event_json(house.told.events[1]))
    assert (ended["event"], ended["status"], ended["source"]) == ("ended", "completed", SOURCE)
    assert ended["rows"] == {"total": 2 * ROWS, "succeeded": 2 * ROWS, "failed": 0, "pending": 0}
    (line,) = [entry for entry in logs if entry["event"] == "job"]
    assert line == line | {
        "job": job.id, "from_status": "running", "to_status": "completed", "request_id": "req-1", "tenant": "t",
        "rows": 2 * ROWS, "log_level": "info",
    }  # fmt: skip


async def test_a_job_is_closed_at_once_where_a_done_chunk_is_announced(house: House) -> None:
    job = await house.accept()
    claim = await house.claim()
    housekeeper = house.make(consumer={"duty_interval_s": 60})
    async with running(housekeeper):
        await until(lambda: len(house.told.events) == 1, "the first round is over")
        await house.work(claim)
        housekeeper.nudge()
        await until(lambda: _status(house, job, Status.COMPLETED), "closed without waiting for the next round")


async def test_a_job_past_its_deadline_expires_and_its_results_go_when_their_time_is_over(
    house: House, clock: Clock
) -> None:
    job = await house.accept(completion_window_s=60, result_ttl_s=60)
    async with running(house.make()):
        clock.advance(61)
        await until(lambda: _status(house, job, Status.EXPIRING), "begins to expire")
        await house.work(await house.claim())
        await until(lambda: _status(house, job, Status.EXPIRED), "expired")
        assert (await house.ledger.get("t", job.id)).rows_failed == ROWS
        assert len(await house.keys()) == 2
        clock.advance(61)
        await until(lambda: _is_empty(house), "its objects are gone")
    assert (await house.ledger.list_jobs("t", None, None, 10)).jobs == []


async def _is_empty(house: House) -> bool:
    return not await house.keys()


async def test_an_upload_without_a_sign_of_life_is_given_up_with_whatever_it_wrote(house: House, clock: Clock) -> None:
    dead = await house.upload(ttl_s=30)
    clock.advance(20)
    alive = await house.upload(ttl_s=30)
    clock.advance(20)
    async with running(house.make()):
        await until(lambda: _has(house, {input_key(alive)}), "the dead upload's object is gone")
    assert not await house.ledger.renew_upload(dead, 30)
    assert await house.ledger.renew_upload(alive, 30)


async def _has(house: House, keys: set[str]) -> bool:
    return await house.keys() == keys


async def test_with_kafka_away_jobs_are_closed_all_the_same_and_their_ends_are_told_when_it_is_back(
    house: House,
) -> None:
    house.told.away = True
    jobs = [await house.accept() for _ in range(3)]
    with capture_logs() as logs:
        async with running(house.make()):
            for _ in jobs:
                await house.work(await house.claim())
            await until(lambda: _status(house, jobs[-1], Status.COMPLETED), "closed")
            await asyncio.sleep(0.2)
            assert (await house.ledger.duties())["notification"] == 6
            house.told.away = False
            await until(lambda: len(house.told.events) == 6, "told")
    assert sum(entry["event"] == "duties wait" for entry in logs) == 1


async def test_two_housekeepers_side_by_side_close_and_tell_each_job_once(house: House) -> None:
    jobs = [await house.accept() for _ in range(40)]
    async with running(house.make(), house.make()):
        for _ in jobs:
            await house.work(await house.claim())
            await asyncio.sleep(0)
        await until(lambda: len(house.told.events) >= 80, "all told")
        await asyncio.sleep(0.05)
    assert sorted(house.told.kinds()) == sorted((job.id, kind) for job in jobs for kind in ("accepted", "ended"))


async def test_what_waits_is_shown_as_a_metric(house: House) -> None:
    await house.accept(chunks=3)
    async with running(house.make()):
        await until(lambda: b'twodoor_duties_waiting{duty="chunk"} 3.0' in house.metrics.render(), "counted")


# -- models that are gone ---------------------------------------------------------------------------------------------


async def test_jobs_of_a_model_that_does_not_exist_fail_and_those_of_one_that_loads_wait(house: House) -> None:
    house.registry.ready["loading"] = ()
    unknown, loading = await house.accept(model="nobody"), await house.accept(model="loading")
    with capture_logs() as logs:
        async with running(house.make(jobs={"model_gone_s": 0.1})):
            await until(lambda: _status(house, unknown, Status.FAILING), "the unknown model's job fails")
            await asyncio.sleep(0.3)
            await house.work(await house.claim(model="other"))
            await until(lambda: _status(house, unknown, Status.FAILED), "failed")
    assert (await house.ledger.get("t", unknown.id)).error_code == "unknown_model"
    assert await _status(house, loading, Status.QUEUED)
    steps = [
        (entry["from_status"], entry["to_status"], entry["request_id"]) for entry in logs if entry["event"] == "job"
    ]
    assert steps == [("queued", "failing", "req-1"), ("failing", "failed", "req-1")]


async def test_jobs_that_pinned_a_version_that_is_gone_fail_but_not_while_triton_is_away(house: House) -> None:
    pinned = await house.accept(chunks=2)
    await house.work(await house.claim())
    house.registry.triton_up = False
    house.registry.ready["m"] = ("2",)
    async with running(house.make(jobs={"model_gone_s": 0.1})):
        await asyncio.sleep(0.4)
        assert await _status(house, pinned, Status.RUNNING)
        house.registry.triton_up = True
        await until(lambda: _status(house, pinned, Status.FAILING), "fails")
    assert (await house.ledger.get("t", pinned.id)).error_code == "model_gone"
    assert f"version {VERSION}" in str((await house.ledger.get("t", pinned.id)).error_message)


# -- garbage ----------------------------------------------------------------------------------------------------------


class Flaky:
    """Objects whose deletes fail as long as ``error`` is set."""

    def __init__(self, house: House) -> None:
        self._objects = house.objects
        self.error: Exception | None = None
        self.deletes: list[int] = []

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self._objects.list(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        if self.error is not None:
            raise self.error
        await self._objects.delete(keys)
        self.deletes.append(len(keys))


async def test_garbage_stays_garbage_until_all_of_it_is_deleted(house: House, clock: Clock) -> None:
    job = await house.accept()
    await house.work(await house.claim())
    flaky: Any = Flaky(house)
    flaky.error = DependencyDown("the object store does not answer")
    keys, house.objects = await house.keys(), flaky
    async with running(house.make()):
        await until(lambda: _status(house, job, Status.COMPLETED), "closed")
        await house.ledger.delete("t", job.id)
        await asyncio.sleep(0.1)
        assert await house.keys() == keys
        flaky.error = None
        clock.advance(60)  # the lease of the try that failed
        await until(lambda: _is_empty(house), "deleted")


async def test_much_garbage_is_deleted_in_pages_and_goes_on_where_it_was_stopped(house: House) -> None:
    prefix = job_prefix(f"job_{'a' * 32}")
    for number in range(1_201):
        await house.objects.put(f"{prefix}parts/{number:08d}/token", b"")
    await house.objects.put("jobs/job_" + "b" * 32 + "/input", b"")
    flaky: Any = Flaky(house)
    answers = iter([True, False])
    assert not await empty(flaky, prefix, lambda: next(answers))
    assert flaky.deletes == [500, 500]
    assert await empty(flaky, prefix, lambda: True)
    assert flaky.deletes == [500, 500, 201]
    assert await house.keys() == {"jobs/job_" + "b" * 32 + "/input"}


@pytest.mark.parametrize("prefix", ["", "jobs/", "imports/t/", "jobs/job_1/", f"jobs/job_{'a' * 32}", "jobs/../"])
async def test_a_prefix_that_is_not_one_job_s_is_never_deleted(house: House, prefix: str) -> None:
    await house.upload()
    before = await house.keys()
    assert await empty(house.objects, prefix, lambda: True)
    assert await house.keys() == before


# -- orphans ----------------------------------------------------------------------------------------------------------


async def _advance(clock: Clock) -> None:
    clock.advance(10)


@pytest.mark.parametrize("skew_s", [0.0, 3_600.0, -3_600.0])
async def test_exactly_what_nobody_can_need_is_swept_whatever_the_store_s_clock_says(
    house: House, clock: Clock, skew_s: float
) -> None:
    needed, orphans = await house.scene(lambda: _advance(clock), lease_s=5)
    assert await house.keys() == needed | orphans
    now = clock.now + timedelta(seconds=skew_s)
    sweep = Orphans(house.ledger, house.objects, 300, lambda: now + timedelta(seconds=300 if skew_s >= 0 else 0))
    assert await sweep.sweep(lambda: True)
    young = skew_s < 0
    assert await house.keys() == (needed | orphans if young else needed)
    assert sweep.deleted == (0 if young else len(orphans))


async def test_what_is_young_imported_or_of_another_shape_is_never_swept(house: House, clock: Clock) -> None:
    job = f"job_{'c' * 32}"
    kept = {
        f"jobs/{job}/other", "jobs/readme", f"jobs/{job}/parts/1/token", f"jobs/{job}/input/more",
        f"jobs/{job.upper()}/input", f"jobs/{job}/parts/00000000/token/deeper",
    }  # fmt: skip
    put = {*kept, f"jobs/{job}/input", f"jobs/{job}/parts/00000000/token"}
    for key in sorted(put):
        await house.objects.put(key, b"")
    young = Orphans(house.ledger, house.objects, 60, clock)
    assert await young.sweep(lambda: True)
    assert await house.keys() == put
    old = Orphans(house.ledger, house.objects, 60, lambda: clock.now + timedelta(seconds=120))
    assert await old.sweep(lambda: True)
    assert await house.keys() == kept


async def test_the_sweep_is_done_once_in_its_interval_by_whoever_comes_first(house: House, clock: Clock) -> None:
    orphan = input_key(f"job_{'d' * 32}")
    settings = {"sweep_interval_s": 60, "orphan_grace_s": 0.001}
    with capture_logs() as logs:
        async with running(house.make(settings), house.make(settings)):
            await until(lambda: _count(logs, "sweep") == 1, "the first sweep")
            await house.objects.put(orphan, b"")
            await asyncio.sleep(0.1)
            assert await house.keys() == {orphan}
            clock.advance(61)
            # The duty is looked for at a tenth of its interval.
    async with running(house.make(settings)):
        await until(lambda: _is_empty(house), "the second sweep")
    assert _count(logs, "sweep") == 1


def _count(logs: Sequence[Any], event: str) -> int:
    return sum(entry["event"] == event for entry in logs)


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_a_duty_that_hangs_does_not_keep_the_process_from_stopping(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = asyncio.Event()

    async def hang(_: int) -> list[Job]:
        hanging.set()
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(house.ledger, "close_due", hang)
    async with running(house.make(consumer={"drain_timeout_s": 0.2})):
        await asyncio.wait_for(hanging.wait(), 5)


async def test_a_claim_s_part_key_is_of_the_shape_the_sweeper_knows(house: House) -> None:
    await house.accept()
    claim = await house.claim()
    await house.put_part(claim)
    await house.ledger.release([claim])
    sweep = Orphans(house.ledger, house.objects, 0, lambda: Clock().now + timedelta(seconds=60))
    assert await sweep.sweep(lambda: True)
    assert part_key(claim) not in await house.keys()
