"""The ledger's contract: uploads, acceptance, and what callers read and ask, on both stores."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from jobs.ledger import input_key, job_prefix
from jobs.states import Status
from serving.errors import (
    DependencyDown,
    IdempotencyMismatch,
    InvalidJob,
    JobNotEnded,
    QuotaExceeded,
    UnknownJob,
)
from tests.contract import ledgers
from tests.contract.ledgers import ROWS, Store, accept, claim, done, ended, new_job, plans, submit, work_off


@pytest_asyncio.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield ledgers.memory_store()
        return
    async with ledgers.postgres_store(request.getfixturevalue("database_url")) as opened:
        yield opened


async def test_a_submission_that_names_no_weight_leaves_its_tenant_the_one_it_has(store: Store) -> None:
    for tenant, weight, kept in (("new", None, 1.0), ("keyed", 3.0, 3.0), ("keyed", None, 3.0), ("keyed", 2.0, 2.0)):
        job = await accept(store.ledger, tenant=tenant, weight=weight)
        found = await claim(store.ledger)
        assert (found.chunk.job, found.weight) == (job.id, kept)
        await store.ledger.complete(found, done(found))


async def test_an_accepted_job_is_queued_with_all_its_rows_pending(store: Store) -> None:
    metadata = {"z": 1, "a": [1.50, None, {"é": True}]}
    new = new_job(25, metadata=metadata, request_id="r1", completion_window_s=60)
    accepted = await store.ledger.accept(new, plans(25))
    assert not accepted.replayed
    job = await store.ledger.get("default", new.id)
    assert job == accepted.job
    assert (job.status, job.rows_total, job.rows_succeeded, job.rows_failed) == (Status.QUEUED, 25, 0, 0)
    assert (job.model, job.model_version, job.request_id, job.source) == ("m", None, "r1", None)
    assert list(job.metadata.items()) == list(metadata.items())
    assert (job.deadline_at - job.created_at).total_seconds() == 60
    assert (job.started_at, job.finished_at, job.expires_at) == (None, None, None)
    assert job.created_at.utcoffset() is not None


async def test_accepting_the_same_job_again_returns_it_and_makes_no_second_one(store: Store) -> None:
    await store.ledger.open_upload("job_up", "default", input_key("job_up"), 60)
    new = new_job(20, id="job_up", uploaded=True)
    first = await store.ledger.accept(new, plans(20))
    again = await store.ledger.accept(new, plans(20))
    assert (again.job, again.replayed) == (first.job, False)
    assert await store.ledger.queued_rows("default") == 20


async def test_acceptance_closes_the_upload_and_a_swept_upload_is_no_job(store: Store) -> None:
    ledger = store.ledger
    for job_id in ("job_live", "job_late"):
        await ledger.open_upload(job_id, "default", input_key(job_id), 30)
    await store.advance(20)
    assert await ledger.renew_upload("job_live", 30)
    await store.advance(20)
    assert (await ledger.duties())["upload"] == 1
    assert list(await ledger.take_expired_uploads(10)) == ["job_late"]
    assert not await ledger.renew_upload("job_late", 30)
    assert not await ledger.drop_upload("job_late")
    with pytest.raises(DependencyDown):
        await ledger.accept(new_job(id="job_late", uploaded=True), plans(ROWS))
    with pytest.raises(UnknownJob):
        await ledger.get("default", "job_late")
    assert list(await ledger.take_garbage("c1", 10, 60)) == [job_prefix("job_late")]
    await ledger.accept(new_job(id="job_live", uploaded=True), plans(ROWS))
    assert not await ledger.drop_upload("job_live")


async def test_an_upload_is_given_up_once(store: Store) -> None:
    await store.ledger.open_upload("job_x", "default", input_key("job_x"), 60)
    assert await store.ledger.drop_upload("job_x")
    assert not await store.ledger.drop_upload("job_x")


async def test_a_quota_counts_the_rows_that_have_no_result_yet(store: Store) -> None:
    ledger = store.ledger
    await accept(ledger, 3, max_queued_rows=30)
    with pytest.raises(QuotaExceeded) as refused:
        await accept(ledger, 1, max_queued_rows=30)
    assert refused.value.limit == 30
    await accept(ledger, 1, tenant="other", max_queued_rows=10)
    found = await claim(ledger)
    assert await ledger.queued_rows("default") == 30
    assert await ledger.complete(found, done(found))
    assert await ledger.queued_rows("default") == 20
    await accept(ledger, 1, max_queued_rows=30)


async def test_a_refused_job_leaves_its_upload_open(store: Store) -> None:
    await store.ledger.open_upload("job_q", "default", input_key("job_q"), 60)
    with pytest.raises(QuotaExceeded):
        await store.ledger.accept(new_job(id="job_q", uploaded=True, max_queued_rows=1), plans(ROWS))
    assert await store.ledger.drop_upload("job_q")


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("metadata", {"metadata": {"a": ["\0"]}}),
        ("metadata", {"metadata": {"\ud800": 1}}),
        ("metadata", {"metadata": {"a": float("nan")}}),
        ("model", {"model": "m\0"}),
        ("idempotency_key", {"idempotency_key": "\0"}),
    ],
)
async def test_what_no_store_can_keep_is_refused_by_name(store: Store, field: str, more: dict[str, object]) -> None:
    with pytest.raises(InvalidJob) as refused:
        await accept(store.ledger, **more)
    assert refused.value.field == field
    assert (await store.ledger.list_jobs("default", None, None, 10)).jobs == []


async def test_an_idempotency_key_gives_the_same_job_for_the_same_request_and_a_refusal_for_another(
    store: Store,
) -> None:
    ledger = store.ledger
    first = await submit(ledger, 2, idempotency_key="k")
    await store.ledger.open_upload("job_again", "default", input_key("job_again"), 60)
    again = await submit(ledger, 2, idempotency_key="k", id="job_again", uploaded=True)
    assert (again.replayed, again.job.id) == (True, first.job.id)
    assert await ledger.drop_upload("job_again"), "a replay leaves the new upload to its caller"
    with pytest.raises(IdempotencyMismatch):
        await submit(ledger, 2, idempotency_key="k", fingerprint=b"other")
    assert (await submit(ledger, 1, idempotency_key="k", tenant="other")).replayed is False
    found = await ledger.find_replay("default", "k")
    assert found == (first.job, again_fingerprint())
    assert await ledger.find_replay("default", "never") is None
    assert await ledger.find_replay("default", "\0") is None


def again_fingerprint() -> bytes:
    return new_job().fingerprint


async def test_two_racing_submissions_with_one_key_make_one_job(store: Store) -> None:
    tries = await asyncio.gather(*(submit(store.ledger, 2, idempotency_key="k") for _ in range(6)))
    assert len({found.job.id for found in tries}) == 1
    assert sum(not found.replayed for found in tries) == 1
    assert await store.ledger.queued_rows("default") == 2 * ROWS


async def test_the_key_of_a_deleted_job_is_a_mismatch_until_it_is_forgotten(store: Store) -> None:
    ledger = store.ledger
    job = await ended(ledger, idempotency_key="k")
    await ledger.delete("default", job.id)
    with pytest.raises(IdempotencyMismatch):
        await submit(ledger, idempotency_key="k")
    assert await ledger.find_replay("default", "k") == (None, again_fingerprint())
    assert await ledger.forget_due(100, 86_400) == 0
    await store.advance(86_401)
    assert await ledger.forget_due(100, 86_400) == 2
    assert not (await submit(ledger, idempotency_key="k")).replayed


async def test_another_tenants_job_is_unknown_whatever_is_asked(store: Store) -> None:
    ledger = store.ledger
    job = await accept(ledger, tenant="owner")
    for job_id in (job.id, "job_none", "\0", "\ud800"):
        for ask in (ledger.get, ledger.parts, ledger.cancel, ledger.delete):
            with pytest.raises(UnknownJob):
                await ask("default", job_id)
        with pytest.raises(UnknownJob):
            await ledger.list_jobs("default", None, job_id, 10)
    assert (await ledger.get("owner", job.id)).status is Status.QUEUED


async def test_pages_over_jobs_of_one_instant_show_each_once(store: Store) -> None:
    ledger = store.ledger
    jobs = [await accept(ledger) for _ in range(25)]
    await make_simultaneous(store)
    expected = sorted((job.id for job in jobs), reverse=True)
    seen: list[str] = []
    more, after = [], None
    for _ in range(3):
        page = await ledger.list_jobs("default", None, after, 10)
        seen += [job.id for job in page.jobs]
        more.append(page.has_more)
        after = seen[-1]
        # A job made between two pages is newer than all of them.
        await store.advance(1)
        await accept(ledger)
    assert seen == expected
    assert more == [True, True, False]


async def make_simultaneous(store: Store) -> None:
    """Give all jobs one moment of creation, as one transaction would."""
    if isinstance(store.ledger, ledgers.MemoryLedger):
        return
    await store.execute("UPDATE twodoor.jobs SET created_at = (SELECT min(created_at) FROM twodoor.jobs)")


async def test_a_page_goes_on_behind_a_job_that_was_deleted_meanwhile(store: Store) -> None:
    ledger = store.ledger
    jobs = []
    for _ in range(4):
        jobs.append(await ended(ledger))
        await store.advance(1)
    page = await ledger.list_jobs("default", None, None, 2)
    assert [job.id for job in page.jobs] == [jobs[3].id, jobs[2].id]
    await ledger.delete("default", jobs[2].id)
    page = await ledger.list_jobs("default", None, jobs[2].id, 2)
    assert ([job.id for job in page.jobs], page.has_more) == ([jobs[1].id, jobs[0].id], False)


async def test_a_list_shows_only_the_states_asked_for(store: Store) -> None:
    ledger = store.ledger
    finished = await ended(ledger)
    waiting = await accept(ledger)
    both = await ledger.list_jobs("default", [Status.QUEUED, Status.COMPLETED], None, 10)
    assert {job.id for job in both.jobs} == {finished.id, waiting.id}
    assert [job.id for job in (await ledger.list_jobs("default", [Status.COMPLETED], None, 10)).jobs] == [finished.id]
    assert (await ledger.list_jobs("default", [Status.FAILED], None, 10)).jobs == []


async def test_parts_are_the_finished_prefix_in_row_order(store: Store) -> None:
    ledger = store.ledger
    job = await accept(ledger, 3)
    first, second, third = [await claim(ledger) for _ in range(3)]
    assert await ledger.complete(third, done(third))
    assert await ledger.parts("default", job.id) == []
    assert await ledger.complete(first, done(first, failed=2))
    (part,) = await ledger.parts("default", job.id)
    assert (part.key, part.first_row, part.row_count) == (done(first).part_key, 0, ROWS)
    assert (part.result_bytes, part.error_bytes) == (500, 40)
    assert await ledger.complete(second, done(second))
    assert [part.first_row for part in await ledger.parts("default", job.id)] == [0, 10, 20]


async def test_cancel_begins_once_and_leaves_an_ended_job_as_it_is(store: Store) -> None:
    ledger = store.ledger
    job = await accept(ledger, 2)
    tries = await asyncio.gather(*(ledger.cancel("default", job.id) for _ in range(4)))
    assert sum(began for _, began in tries) == 1
    assert {found.status for found, _ in tries} == {Status.CANCELLING}
    finished = await work_off(ledger, failed=ROWS)
    assert {found.status for found in finished} == {Status.CANCELLING}
    assert {found.model_version for found in finished} == {None}
    (closed,) = await ledger.close_due(10)
    assert (closed.status, closed.rows_failed, closed.started_at) == (Status.CANCELLED, 2 * ROWS, None)
    assert await ledger.cancel("default", job.id) == (closed, False)


async def test_only_an_ended_job_can_be_deleted_and_then_it_is_gone(store: Store) -> None:
    ledger = store.ledger
    job = await accept(ledger)
    with pytest.raises(JobNotEnded):
        await ledger.delete("default", job.id)
    await work_off(ledger)
    with pytest.raises(JobNotEnded):
        await ledger.delete("default", job.id)
    await ledger.close_due(10)
    await ledger.delete("default", job.id)
    with pytest.raises(UnknownJob):
        await ledger.delete("default", job.id)
    assert (await ledger.list_jobs("default", None, None, 10)).jobs == []
    assert list(await ledger.take_garbage("c1", 10, 60)) == [job_prefix(job.id)]
