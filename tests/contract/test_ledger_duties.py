"""The ledger's contract: closing, expiry, retention, notifications, garbage and references, on both stores."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from jobs.ledger import input_key, job_prefix, part_key
from jobs.states import Status
from serving.errors import UnknownJob
from tests.contract import ledgers
from tests.contract.ledgers import ROWS, Store, accept, claim, done, ended, new_job, plans, work_off

SOURCE = {"topic": "twodoor.jobs", "partition": 3, "offset": 41}


@pytest_asyncio.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield ledgers.memory_store()
        return
    async with ledgers.postgres_store(request.getfixturevalue("database_url")) as opened:
        yield opened


async def test_a_job_without_an_open_chunk_is_closed_once_and_its_counts_are_frozen(store: Store) -> None:
    ledger = store.ledger
    job = await accept(ledger, 3, result_ttl_s=100)
    claims = [await claim(ledger) for _ in range(3)]
    for found, failed in zip(claims[:2], (0, 4), strict=True):
        assert await ledger.complete(found, done(found, failed))
    running = await ledger.get("default", job.id)
    assert (running.status, running.rows_succeeded, running.rows_failed) == (Status.RUNNING, 16, 4)
    assert await ledger.close_due(10) == []
    assert await ledger.complete(claims[2], done(claims[2]))
    assert (await ledger.duties())["close"] == 1
    closed = [job for jobs in await asyncio.gather(*(ledger.close_due(10) for _ in range(4))) for job in jobs]
    assert len(closed) == 1
    assert closed[0] == await ledger.get("default", job.id)
    assert (closed[0].status, closed[0].rows_succeeded, closed[0].rows_failed) == (Status.COMPLETED, 26, 4)
    assert closed[0].finished_at is not None
    assert closed[0].expires_at is not None
    assert (closed[0].expires_at - closed[0].finished_at).total_seconds() == pytest.approx(100, abs=0.1)
    assert (await ledger.duties())["close"] == 0


async def test_closing_takes_no_more_than_the_limit(store: Store) -> None:
    for _ in range(5):
        await accept(store.ledger)
    await work_off(store.ledger)
    assert [len(await store.ledger.close_due(2)) for _ in range(4)] == [2, 2, 1, 0]


async def test_a_job_past_its_window_expires_only_while_it_has_open_chunks(store: Store) -> None:
    ledger = store.ledger
    late, running, finished = [await accept(ledger, completion_window_s=60) for _ in range(3)]
    patient = await accept(ledger, completion_window_s=600)
    await claim(ledger, full=[late.id, finished.id, patient.id])
    found = await claim(ledger, full=[late.id, running.id, patient.id])
    assert await ledger.complete(found, done(found))
    assert await ledger.expire_due(10) == []
    await store.advance(61)
    assert (await ledger.duties())["expire"] == 2
    expiring = await ledger.expire_due(10)
    assert {job.id for job in expiring} == {late.id, running.id}
    assert {job.status for job in expiring} == {Status.EXPIRING}
    assert await ledger.expire_due(10) == []
    assert {job.id for job in await ledger.close_due(10)} == {finished.id}
    await work_off(ledger)
    ends = {job.id: job.status for job in await ledger.close_due(10)}
    assert ends == {late.id: Status.EXPIRED, running.id: Status.EXPIRED, patient.id: Status.COMPLETED}


async def test_results_that_have_expired_are_retired_as_if_deleted(store: Store) -> None:
    ledger = store.ledger
    short = await ended(ledger, 2, result_ttl_s=10)
    await store.advance(1)
    kept = await ended(ledger, result_ttl_s=1_000)
    assert await ledger.retire_due(10) == []
    await store.advance(11)
    assert (await ledger.duties())["retire"] == 1
    (retired,) = await ledger.retire_due(10)
    assert (retired.id, retired.rows_succeeded) == (short.id, 2 * ROWS)
    assert await ledger.retire_due(10) == []
    with pytest.raises(UnknownJob):
        await ledger.get("default", short.id)
    assert [job.id for job in (await ledger.list_jobs("default", None, short.id, 10)).jobs] == []
    assert [job.id for job in (await ledger.list_jobs("default", None, None, 10)).jobs] == [kept.id]
    assert list(await ledger.take_garbage("c1", 10, 60)) == [job_prefix(short.id)]


async def test_nothing_is_left_of_a_removed_job_once_it_is_forgotten(store: Store) -> None:
    ledger = store.ledger
    job = await ended(ledger, source=SOURCE, idempotency_key="k")
    await ledger.delete("default", job.id)
    await store.advance(90_000)
    assert await ledger.forget_due(10, 86_400) == 1, "its events are not told yet: only the key goes"
    told = await ledger.take_notifications("c1", 10, 60)
    assert [(found.kind, found.job.id) for found in told] == [("accepted", job.id), ("ended", job.id)]
    await ledger.drop_notifications([found.id for found in told])
    assert await ledger.forget_due(10, 86_400) == 1
    with pytest.raises(UnknownJob):
        await ledger.list_jobs("default", None, job.id, 10)


async def test_acceptance_and_end_are_told_of_jobs_that_came_by_topic_only(store: Store) -> None:
    ledger = store.ledger
    await ended(ledger)
    job = await ended(ledger, source=SOURCE)
    assert (await ledger.duties())["notification"] == 2
    accepted, finished = await ledger.take_notifications("c1", 10, 60)
    assert (accepted.kind, accepted.job.status, accepted.job.rows_succeeded) == ("accepted", Status.QUEUED, 0)
    assert (accepted.job.finished_at, accepted.job.model_version) == (None, None)
    assert (finished.kind, finished.job) == ("ended", job)
    assert accepted.job.source == finished.job.source == SOURCE
    assert (await ledger.duties())["notification"] == 0


async def test_a_notification_is_leased_and_comes_again_when_nobody_drops_it(store: Store) -> None:
    ledger = store.ledger
    jobs = [await accept(ledger, source=SOURCE) for _ in range(3)]
    first = await ledger.take_notifications("c1", 2, 30)
    assert [found.job.id for found in first] == [job.id for job in jobs[:2]], "oldest first"
    assert [found.job.id for found in await ledger.take_notifications("c2", 2, 30)] == [jobs[2].id]
    assert await ledger.take_notifications("c3", 2, 30) == []
    await ledger.drop_notifications([first[0].id])
    await ledger.drop_notifications([first[0].id])
    await store.advance(31)
    again = await ledger.take_notifications("c3", 10, 30)
    assert [found.job.id for found in again] == [jobs[1].id, jobs[2].id]


async def test_a_jobs_end_is_not_told_while_its_acceptance_is_on_its_way(store: Store) -> None:
    ledger = store.ledger
    await accept(ledger, source=SOURCE)
    (accepted,) = await ledger.take_notifications("c1", 10, 30)
    await work_off(ledger)
    await ledger.close_due(10)
    assert await ledger.take_notifications("c2", 10, 30) == []
    await ledger.drop_notifications([accepted.id])
    assert [found.kind for found in await ledger.take_notifications("c2", 10, 30)] == ["ended"]


async def test_garbage_is_leased_until_it_is_dropped(store: Store) -> None:
    ledger = store.ledger
    jobs = [await ended(ledger) for _ in range(3)]
    for job in jobs:
        await ledger.delete("default", job.id)
    first = await ledger.take_garbage("c1", 2, 30)
    assert len(first) == 2
    rest = await ledger.take_garbage("c2", 2, 30)
    assert {*first, *rest} == {job_prefix(job.id) for job in jobs}
    assert (await ledger.duties())["garbage"] == 0
    await ledger.drop_garbage(first)
    await store.advance(31)
    assert await ledger.take_garbage("c2", 10, 30) == rest


async def test_a_periodic_duty_has_one_owner_and_comes_back_after_its_interval(store: Store) -> None:
    ledger = store.ledger
    tries = await asyncio.gather(*(ledger.take_duty("sweep", f"c{number}", 100, 30) for number in range(4)))
    assert sum(tries) == 1
    owner = f"c{tries.index(True)}"
    assert await ledger.take_duty("other", "c9", 100, 30)
    await ledger.end_duty("sweep", "stranger")
    await ledger.end_duty("sweep", owner)
    assert not await ledger.take_duty("sweep", "c9", 100, 30)
    await store.advance(101)
    assert await ledger.take_duty("sweep", "c9", 100, 30)
    await store.advance(31)
    assert await ledger.take_duty("sweep", "c8", 100, 30), "its owner died"


async def test_only_what_a_live_job_needs_is_referred_to(store: Store) -> None:
    ledger = store.ledger
    await ledger.open_upload("job_up", "default", input_key("job_up"), 60)
    job = await accept(ledger, 3)
    superseded = await claim(ledger, lease_s=1)
    await store.advance(2)
    current = await claim(ledger)
    finished = await claim(ledger)
    assert await ledger.complete(finished, done(finished))
    released = await claim(ledger)
    await ledger.release([released])
    foreign = "imports/default/x.jsonl"
    live = {input_key("job_up"), input_key(job.id), part_key(current), part_key(finished), foreign}
    orphans = [
        input_key("job_none"), part_key(superseded), part_key(released), f"{job_prefix(job.id)}parts/00000099/x",
        f"{job_prefix(job.id)}parts/00000001/{current.token}",
    ]  # fmt: skip
    assert await ledger.referenced([*live, *orphans]) == live
    assert await ledger.referenced([]) == frozenset()
    await ledger.drop_upload("job_up")
    await work_off(ledger)
    assert await ledger.complete(current, done(current))
    await ledger.close_due(10)
    await ledger.delete("default", job.id)
    assert await ledger.referenced([*live, *orphans]) == {foreign}


async def test_the_models_that_open_jobs_need_are_known(store: Store) -> None:
    ledger = store.ledger
    await ended(ledger)
    pinned = await accept(ledger, 2)
    await claim(ledger)
    fresh, other = await accept(ledger), await accept(ledger, model="x")
    cancelled = await accept(ledger, model="gone")
    await ledger.cancel("default", cancelled.id)
    assert await ledger.wanted() == {"m": {"1", None}, "x": {None}}
    assert await ledger.jobs_wanting("m", "1", 10) == [pinned.id]
    assert await ledger.jobs_wanting("m", None, 10) == [fresh.id]
    assert await ledger.jobs_wanting("x", None, 10) == [other.id]
    assert await ledger.jobs_wanting("gone", None, 10) == []


async def test_duties_are_counted_by_kind(store: Store) -> None:
    assert await store.ledger.duties() == dict.fromkeys(
        ("chunk", "close", "expire", "retire", "upload", "garbage", "notification"), 0
    )
    job = new_job(40)
    await store.ledger.accept(job, plans(40))
    assert (await store.ledger.duties())["chunk"] == 4


async def test_a_ledger_that_answers_is_pinged(store: Store) -> None:
    await store.ledger.ping()
