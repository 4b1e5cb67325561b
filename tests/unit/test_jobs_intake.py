"""From a request to a job: everything or nothing, and nothing is left behind."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from jobs.forms import JobRequest
from jobs.intake import JobIntake, Submitter
from jobs.ledger import input_key
from jobs.memory import MemoryLedger
from jobs.objects import Objects, memory_objects, open_objects
from jobs.records import Accepted, ChunkPlan, NewJob
from serving.errors import (
    DependencyDown,
    EmptyInput,
    IdempotencyMismatch,
    InvalidJob,
    QuotaExceeded,
)
from serving.settings import JobsSettings

TENANT = Submitter("default")
LINES = b'{"text": "one"}\n{"text": "two"}\r\n\n"three"'
LIMITS = JobsSettings(chunk_rows=2)


class Ledger(MemoryLedger):
    """The ledger in memory, that remembers what was accepted and fails as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[tuple[NewJob, Sequence[ChunkPlan]]] = []
        self.lost_answers = 0
        self.away = False
        self.renewals = 0
        self.accepting = asyncio.Event()
        self.may_accept = asyncio.Event()
        self.may_accept.set()

    async def accept(self, job: NewJob, chunks: Sequence[ChunkPlan]) -> Accepted:
        self.accepting.set()
        await self.may_accept.wait()
        if self.away:
            raise DependencyDown("the ledger does not answer")
        answer = await super().accept(job, chunks)
        self.accepted.append((job, chunks))
        if self.lost_answers:
            self.lost_answers -= 1
            raise DependencyDown("the ledger does not answer")
        return answer

    async def renew_upload(self, job_id: str, ttl_s: float) -> bool:
        self.renewals += 1
        return await super().renew_upload(job_id, ttl_s)

    @property
    def uploads(self) -> int:
        return len(self._state.uploads)

    @property
    def jobs(self) -> int:
        return len(self._state.jobs)

    def sweep(self) -> None:
        self._state.uploads.clear()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def objects() -> Objects:
    return memory_objects()


@pytest.fixture
def intake(ledger: Ledger, objects: Objects) -> JobIntake:
    return JobIntake(ledger, objects, LIMITS)


async def body(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def keys_of(objects: Objects) -> list[str]:
    return [info.key async for info in objects.list("jobs/")]


def request(**changed: Any) -> JobRequest:
    return JobRequest(**{"model": "sentiment_model", **changed})


async def test_a_jsonl_body_becomes_an_object_as_it_was_sent_and_a_job_with_its_chunks(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    accepted = await intake.submit(
        request(metadata={"run": "7"}), Submitter("acme", 3.0), body(LINES[:9], LINES[9:]), request_id="r-1"
    )
    (new, chunks), job = ledger.accepted[0], accepted.job
    assert not accepted.replayed
    assert await objects.get(input_key(job.id)) == LINES
    assert (new.tenant, new.weight, new.has_lines, new.uploaded, new.request_id) == ("acme", 3.0, True, True, "r-1")
    assert (new.row_count, new.input_bytes, job.rows_total, job.metadata) == (3, len(LINES), 3, {"run": "7"})
    assert [(c.row_count, c.first_line) for c in chunks] == [(2, 1), (1, 4)]
    assert (new.completion_window_s, new.result_ttl_s) == (LIMITS.completion_window_s, LIMITS.result_ttl_s)
    assert ledger.uploads == 0


async def test_inputs_of_a_json_body_are_kept_one_ascii_line_each_exactly_as_given(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    inputs = ["one", {"id": "\0", "text": "a\u2028b\x85c"}, 5, None, "\ud800", ["x"], {"text": "ж"}, float("inf"), ""]
    accepted = await intake.submit(request(inputs=inputs), TENANT)
    stored = await objects.get(input_key(accepted.job.id))
    assert stored.isascii()
    assert [json.loads(line) for line in stored.splitlines()] == [*inputs[:7], None, ""]
    assert (accepted.job.rows_total, ledger.accepted[0][0].has_lines) == (len(inputs), False)


async def test_an_imported_object_is_cut_where_it_lies_and_never_counts_as_ours(ledger: Ledger, tmp_path: Any) -> None:
    (tmp_path / "imports/default/april").mkdir(parents=True)
    name = "imports/default/april/отчёт 1.jsonl"
    (tmp_path / name).write_bytes(LINES)
    objects = open_objects(JobsSettings(objects_url=f"file://{tmp_path}"))
    await JobIntake(ledger, objects, LIMITS).submit(request(input_object=name), TENANT)
    new = ledger.accepted[0][0]
    assert (new.input_key, new.uploaded, new.has_lines, new.row_count) == (name, False, True, 3)
    assert await keys_of(objects) == []


async def test_an_imported_object_that_is_not_there_is_named(intake: JobIntake) -> None:
    with pytest.raises(InvalidJob) as refused:
        await intake.submit(request(input_object="imports/default/none.jsonl"), TENANT)
    assert refused.value.field == "input_object"


@pytest.mark.parametrize("data", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf\n"])
async def test_an_input_without_a_row_is_no_job(
    intake: JobIntake, ledger: Ledger, objects: Objects, data: bytes
) -> None:
    with pytest.raises(EmptyInput):
        await intake.submit(request(), TENANT, body(data))
    assert (ledger.jobs, ledger.uploads, await keys_of(objects)) == (0, 0, [])


async def test_a_cut_body_passes_its_error_on_and_leaves_nothing(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    async def cut() -> AsyncIterator[bytes]:
        yield LINES * 100_000
        raise ConnectionResetError("cut")

    with pytest.raises(ConnectionResetError):
        await intake.submit(request(), TENANT, cut())
    assert (ledger.jobs, ledger.uploads, await keys_of(objects)) == (0, 0, [])


async def test_more_rows_than_a_job_may_have_are_refused_while_they_come(ledger: Ledger, objects: Objects) -> None:
    intake = JobIntake(ledger, objects, JobsSettings(max_rows=100_000))

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"1\n" * 10_000

    with pytest.raises(InvalidJob) as refused:
        await intake.submit(request(), TENANT, endless())
    assert (refused.value.field, refused.value.limit) == ("body", 100_000)
    assert (ledger.uploads, await keys_of(objects)) == (0, [])


async def test_a_caller_that_goes_away_while_it_sends_leaves_nothing(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    sent = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield LINES
        sent.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(intake.submit(request(), TENANT, stuck()))
    await sent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (ledger.jobs, ledger.uploads, await keys_of(objects)) == (0, 0, [])


async def test_a_caller_that_goes_away_at_the_last_moment_has_a_whole_job_or_none(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    ledger.may_accept.clear()
    task = asyncio.create_task(intake.submit(request(), TENANT, body(LINES)))
    await ledger.accepting.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    ledger.may_accept.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (ledger.jobs, ledger.uploads) == (1, 0)
    assert await keys_of(objects) == [ledger.accepted[0][0].input_key]


async def test_an_answer_that_was_lost_is_asked_for_again_and_gives_one_job(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    ledger.lost_answers = 1
    accepted = await intake.submit(request(), TENANT, body(LINES))
    assert (ledger.jobs, accepted.replayed) == (1, False)
    assert await keys_of(objects) == [input_key(accepted.job.id)]


async def test_where_the_outcome_stays_unknown_the_input_is_left_to_the_sweeper(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    ledger.away = True
    with pytest.raises(DependencyDown):
        await intake.submit(request(), TENANT, body(LINES))
    assert (ledger.uploads, len(await keys_of(objects))) == (1, 1)


async def test_a_store_that_is_away_refuses_and_gives_the_upload_up(ledger: Ledger, tmp_path: Any) -> None:
    objects = open_objects(JobsSettings(objects_url=f"file://{tmp_path}/objects"))
    (tmp_path / "objects/jobs").write_bytes(b"a file where the folder should be")
    with pytest.raises(DependencyDown):
        await JobIntake(ledger, objects, LIMITS).submit(request(), TENANT, body(LINES))
    assert (ledger.jobs, ledger.uploads) == (0, 0)


async def test_an_upload_is_renewed_while_a_slow_caller_pauses_and_ends_where_it_was_swept(
    ledger: Ledger, objects: Objects
) -> None:
    intake = JobIntake(ledger, objects, JobsSettings(upload_ttl_s=0.06))

    async def slow(sweep: bool) -> AsyncIterator[bytes]:
        yield LINES
        if sweep:
            ledger.sweep()
        before = ledger.renewals
        async with asyncio.timeout(10):
            while ledger.renewals < before + (1 if sweep else 3):
                await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        yield LINES

    accepted = await intake.submit(request(), TENANT, slow(sweep=False))
    assert accepted.job.rows_total == 5  # "three" and the first line of the second piece are one line
    with pytest.raises(DependencyDown):
        await intake.submit(request(), TENANT, slow(sweep=True))
    assert await keys_of(objects) == [input_key(accepted.job.id)]


async def test_the_same_key_and_request_give_the_same_job_and_store_nothing_again(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    first = await intake.submit(request(), TENANT, body(LINES), idempotency_key="k")
    again = await intake.submit(request(), TENANT, body(*[LINES[i : i + 1] for i in range(len(LINES))]), "k")
    assert (again.replayed, again.job.id) == (True, first.job.id)
    assert (ledger.jobs, ledger.uploads, len(await keys_of(objects))) == (1, 0, 1)


@pytest.mark.parametrize(
    ("other", "data"),
    [
        (request(), LINES + b"\n4"),
        (request(truncate=True), LINES),
        (request(metadata={"a": "b"}), LINES),
        (request(result_ttl_s=5), LINES),
        (request(model="embedding_model"), LINES),
    ],
)
async def test_the_same_key_for_another_request_is_refused(
    intake: JobIntake, ledger: Ledger, other: JobRequest, data: bytes
) -> None:
    await intake.submit(request(), TENANT, body(LINES), idempotency_key="k")
    with pytest.raises(IdempotencyMismatch):
        await intake.submit(other, TENANT, body(data), idempotency_key="k")
    accepted = await intake.submit(other, Submitter("other"), body(data), idempotency_key="k")
    assert (accepted.replayed, ledger.jobs, ledger.uploads) == (False, 2, 0)


async def test_two_racing_with_one_key_make_one_job_and_one_object(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    ledger.may_accept.clear()
    race = [asyncio.create_task(intake.submit(request(), TENANT, body(LINES), "k")) for _ in range(4)]
    async with asyncio.timeout(10):
        while ledger.uploads < 4:
            await asyncio.sleep(0.001)
    ledger.may_accept.set()
    answers = await asyncio.gather(*race)
    assert sorted(answer.replayed for answer in answers) == [False, True, True, True]
    assert len({answer.job.id for answer in answers}) == 1
    assert (ledger.uploads, await keys_of(objects)) == (0, [input_key(answers[0].job.id)])


@pytest.mark.parametrize("key", ["", "a\0b", "k" * 256, "a\nb"])
async def test_a_key_that_cannot_be_kept_is_refused(intake: JobIntake, key: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        await intake.submit(request(), TENANT, body(LINES), idempotency_key=key)
    assert refused.value.field == "Idempotency-Key"


async def test_a_tenant_over_its_quota_is_refused_before_and_after_the_upload_but_a_replay_is_not(
    intake: JobIntake, ledger: Ledger, objects: Objects
) -> None:
    tenant = Submitter("default", max_queued_rows=4)
    await intake.submit(request(), tenant, body(LINES), idempotency_key="k")
    with pytest.raises(QuotaExceeded):
        await intake.submit(request(), tenant, body(LINES))  # 3 more rows: the ledger says no
    await intake.submit(request(), tenant, body(b"4"))
    untouched = body(LINES)
    with pytest.raises(QuotaExceeded):
        await intake.submit(request(), tenant, untouched)
    assert await anext(untouched) == LINES
    assert (await intake.submit(request(), tenant, body(LINES), "k")).replayed
    assert (ledger.jobs, ledger.uploads, len(await keys_of(objects))) == (2, 0, 2)


async def test_memory_does_not_grow_with_the_body(ledger: Ledger, tmp_path: Any) -> None:
    objects = open_objects(JobsSettings(objects_url=f"file://{tmp_path}/objects"))
    piece = b'{"text": "a row of about the usual size, sixty bytes in all"}\n' * 1_000

    async def large() -> AsyncIterator[bytes]:
        for _ in range(1_000):
            yield piece

    tracemalloc.start()
    try:
        accepted = await JobIntake(ledger, objects, JobsSettings()).submit(request(), TENANT, large())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert accepted.job.rows_total == 1_000_000
    assert peak_bytes < 16 * 2**20


async def test_the_lines_of_inputs_are_never_in_memory_at_once(ledger: Ledger, objects: Objects) -> None:
    inputs = ["a row of about the usual size, sixty bytes in all, no more"] * 100_000
    tracemalloc.start()
    try:
        accepted = await JobIntake(ledger, objects, JobsSettings()).submit(request(inputs=inputs), TENANT)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert accepted.job.rows_total == len(inputs)
    assert peak_bytes < 10 * 2**20
