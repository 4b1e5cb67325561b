"""The job API over a real PostgreSQL and a folder of objects: kept as told, honest while one is away, flat in memory."""

import asyncio
import http.client
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from gateway.job_door import Stores
from jobs.objects import open_objects
from jobs.postgres import open_ledger
from serving.errors import ConfigError
from serving.settings import JobsSettings
from tests.conftest import GatewayFactory
from tests.integration.gateway_jobs import MODEL, Door, job_door, keys_file, problem, rows_of, until
from tests.parts import Gateway, Postgres, Triton
from tests.stubs import STUB

LINES = b'"good"\n"bad"\n' * 10
MB = 2**20
UPLOAD_MB = 200


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> JobsSettings:
    return JobsSettings.model_validate(
        {
            "database_url": database_url,
            "objects_url": f"file://{tmp_path}/objects",
            "database_timeout_s": 1.0,
            "chunk_rows": 5,
        }
    )


@pytest.fixture
async def stores(settings: JobsSettings) -> AsyncIterator[Stores]:
    async with open_ledger(settings) as ledger:
        yield Stores(ledger, open_objects(settings))


@pytest.fixture
async def door(stores: Stores) -> AsyncIterator[Door]:
    async with job_door(stores, jobs={"chunk_rows": 5}) as opened:
        yield opened


async def count(database_url: str, table: str) -> int:
    async with await psycopg.AsyncConnection.connect(database_url, connect_timeout=5) as connection:
        cursor = await connection.execute(f"SELECT count(*) FROM twodoor.{table}".encode())
        (found,) = await cursor.fetchone() or (0,)
        return int(found)


async def test_a_job_goes_its_way_from_upload_to_deletion(door: Door) -> None:
    first = await door.lines(LINES, idempotency_key="k")
    again = await door.lines(LINES, idempotency_key="k")
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    problem(await door.lines(LINES + b"1", idempotency_key="k"), 422, "idempotency_mismatch")
    job_id = first.json()["id"]
    problem(await door.client.get(f"/v1/jobs/{job_id}/results"), 409, "job_not_ended")
    await door.work(chunks=2)
    partial = await door.client.get(f"/v1/jobs/{job_id}/results?partial=true")
    assert len(rows_of(partial.content)) == 10
    assert (await door.job(job_id))["rows"] == {"total": 20, "succeeded": 10, "failed": 0, "pending": 10}
    waiting = asyncio.create_task(door.client.get(f"/v1/jobs/{job_id}", headers={"prefer": "wait=20"}))
    await door.work(failing=[12, 19])
    assert (await waiting).json()["status"] == "completed"
    whole = await door.client.get(f"/v1/jobs/{job_id}/results")
    assert [row["index"] for row in rows_of(whole.content)] == list(range(20))
    part = await door.client.get(f"/v1/jobs/{job_id}/results", headers={"range": "bytes=200-700"})
    assert (part.status_code, part.content) == (206, whole.content[200:701])
    errors = await door.client.get(f"/v1/jobs/{job_id}/results?only=errors")
    assert [row["index"] for row in rows_of(errors.content)] == [12, 19]
    assert (await door.client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200
    assert (await door.client.delete(f"/v1/jobs/{job_id}")).status_code == 204
    problem(await door.client.get(f"/v1/jobs/{job_id}"), 404, "not_found")
    problem(await door.lines(LINES, idempotency_key="k"), 422, "idempotency_mismatch")


async def test_ten_with_one_key_at_one_time_make_one_job(door: Door, database_url: str) -> None:
    answers = await asyncio.gather(*(door.lines(LINES, idempotency_key="race") for _ in range(10)))
    assert {response.status_code for response in answers} == {202}
    assert len({response.json()["id"] for response in answers}) == 1
    assert [await count(database_url, table) for table in ("jobs", "uploads")] == [1, 0]
    assert len([info async for info in door.objects.list("jobs/")]) == 1


async def test_refused_uploads_leave_neither_rows_nor_objects(
    stores: Stores, database_url: str, tmp_path: Path
) -> None:
    keys = keys_file(tmp_path, max_queued_rows=3)
    async with job_door(stores, keys=keys, max_job_body_bytes=1024) as door:
        acme = {"authorization": "Bearer sk-acme"}
        problem(await door.lines(b"\n\n", **acme), 422, "empty_input")
        problem(await door.lines(LINES, content_encoding="gzip", **acme), 400, "invalid_body")
        problem(await door.lines(b'"x"\n' * 4, **acme), 429, "quota_exceeded")
        problem(await door.lines(b'"x"\n' * 400, **acme), 413, "body_too_large")
        assert [await count(database_url, table) for table in ("jobs", "chunks", "uploads")] == [0, 0, 0]
        assert [info.key async for info in door.objects.list("jobs/")] == []


async def test_pages_over_ties_show_each_job_once(door: Door, database_url: str) -> None:
    made = {(await door.submit("a"))["id"] for _ in range(12)}
    async with await psycopg.AsyncConnection.connect(database_url, connect_timeout=5) as connection:
        await connection.execute("UPDATE twodoor.jobs SET created_at = now()")
    seen: list[str] = []
    after = ""
    while True:
        page = (await door.client.get("/v1/jobs", params={"limit": 5, "after": after})).json()
        seen += [job["id"] for job in page["data"]]
        after = page["next"]
        if not page["has_more"]:
            break
    assert (len(seen), set(seen)) == (12, made)
    assert seen == sorted(seen, reverse=True)


async def test_while_the_ledger_is_silent_jobs_are_503_and_predict_answers(
    stores: Stores, postgres_server: Postgres, triton: Triton
) -> None:
    async with job_door(stores, triton=triton) as door:
        job = await door.submit("a")
        postgres_server.freeze()
        try:
            answers = await asyncio.gather(
                door.lines(LINES),
                door.client.get(f"/v1/jobs/{job['id']}"),
                door.client.get("/v1/jobs"),
                door.client.post(f"/v1/jobs/{job['id']}/cancel"),
                door.client.post("/predict", json={"text": "good", "model": STUB}),
                door.client.get("/readyz"),
                door.client.get(f"/v1/jobs/{job['id']}", headers={"x-timeout-ms": "200"}),
            )
            for response in answers[:4]:
                problem(response, 503, "dependency_down")
                assert int(response.headers["retry-after"]) >= 1
            assert [response.status_code for response in answers[4:]] == [200, 200, 504]

            async def told() -> bool:
                return (await door.client.get("/readyz")).json()["dependencies"]["postgres"] == "down"

            await until(told, "the ledger is told to be down")
        finally:
            postgres_server.thaw()

        async def back() -> bool:
            return (await door.client.get(f"/v1/jobs/{job['id']}")).status_code == 200

        await until(back, "the ledger answers")
        assert (await door.lines(LINES)).status_code == 202


async def test_while_the_object_store_is_away_submitting_is_503_and_comes_back(
    door: Door, database_url: str, tmp_path: Path
) -> None:
    job = await door.submit("a")
    await door.work()
    shutil.move(tmp_path / "objects", tmp_path / "away")
    (tmp_path / "objects").write_text("no folder")
    response = await door.lines(LINES)
    problem(response, 503, "dependency_down")
    assert int(response.headers["retry-after"]) >= 1
    problem(await door.client.get(f"/v1/jobs/{job['id']}/results"), 503, "dependency_down")
    assert (await door.job(job["id"]))["status"] == "completed"
    assert await count(database_url, "jobs") == 1
    (tmp_path / "objects").unlink()
    shutil.move(tmp_path / "away", tmp_path / "objects")
    assert (await door.client.get(f"/v1/jobs/{job['id']}/results")).status_code == 200
    assert (await door.lines(LINES)).status_code == 202


@pytest.fixture
def process(gateway_factory: GatewayFactory, tmp_path: Path, database_url: str) -> Gateway:
    """A gateway of its own process with jobs; Triton is away."""
    return gateway_factory(
        "127.0.0.1:1",
        tmp_path,
        TWODOOR_JOBS_DATABASE_URL=database_url,
        TWODOOR_JOBS_OBJECTS_URL=f"file://{tmp_path}/objects",
    ).start(triton_up=False)


def submit(gateway: Gateway, key: str) -> tuple[int, str | None, str]:
    """Submit with an Idempotency-Key; returns the status, whether it says it is a replay, and the job's id."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
    try:
        headers = {"Content-Type": "application/jsonl", "Idempotency-Key": key}
        connection.request("POST", f"/v1/jobs?model={MODEL}", LINES, headers)
        response = connection.getresponse()
        replayed = response.getheader("Idempotent-Replayed")
        return response.status, replayed, json.loads(response.read())["id"]
    finally:
        connection.close()


async def test_a_submission_whose_gateway_died_half_way_is_one_job_when_it_is_sent_again(
    gateway_factory: GatewayFactory, tmp_path: Path, database_url: str
) -> None:
    def gateway(**more: str) -> Gateway:
        objects = f"file://{tmp_path}/objects"
        made = gateway_factory(
            "127.0.0.1:1", tmp_path, TWODOOR_JOBS_DATABASE_URL=database_url, TWODOOR_JOBS_OBJECTS_URL=objects, **more
        )
        return made.start(triton_up=False)

    moments = ("before_accept", "after_accept")
    for moment in moments:
        dying = gateway(TWODOOR_TEST_CRASHPOINT=moment)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            await asyncio.to_thread(submit, dying, moment)
    assert await count(database_url, "jobs") == 1
    next_one = gateway()
    for moment in moments:
        answers = [await asyncio.to_thread(submit, next_one, moment) for _ in range(2)]
        assert [status for status, _, _ in answers] == [202, 202]
        assert [replayed for _, replayed, _ in answers] == ["true" if moment == "after_accept" else None, "true"]
        assert len({job for _, _, job in answers}) == 1
    assert [await count(database_url, table) for table in ("jobs", "uploads")] == [2, 1]


def memory_bytes(gateway: Gateway, name: str) -> int:
    """``VmRSS`` now, ``VmHWM`` the most so far."""
    status = Path(f"/proc/{gateway.child.pid}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found
    return int(found.group(1)) * 1024


def upload(gateway: Gateway, megabytes: int) -> int:
    """Send a body that is made while it is sent; returns the rows the gateway counted."""
    row = b'{"text": "' + b"a gorgeous, witty, seductive movie " * 28 + b'"}\n'
    block = (row * (MB // len(row) + 1))[: MB // len(row) * len(row)]
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    try:
        headers = {"Content-Type": "application/jsonl", "Transfer-Encoding": "chunked"}
        blocks = (block for _ in range(megabytes))
        connection.request("POST", f"/v1/jobs?model={MODEL}", blocks, headers, encode_chunked=True)
        response = connection.getresponse()
        content = json.loads(response.read())
        assert response.status == 202, content
        return int(content["rows"]["total"])
    finally:
        connection.close()


def test_a_large_upload_leaves_the_gateways_memory_where_it_was(process: Gateway) -> None:
    upload(process, 8)  # what is allocated once does not count
    before = memory_bytes(process, "VmRSS")
    rows = upload(process, UPLOAD_MB)
    assert rows == upload(process, 8) // 8 * UPLOAD_MB
    peak, after = memory_bytes(process, "VmHWM"), memory_bytes(process, "VmRSS")
    print(f"RSS before {before / MB:.0f} MB, peak {peak / MB:.0f} MB, after {after / MB:.0f} MB")
    assert peak - before < 24 * MB
    assert after - before < 12 * MB
    assert "Traceback" not in process.log()


async def test_a_ledger_that_was_not_migrated_ends_the_gateway_and_says_what_to_do(
    settings: JobsSettings, database_url: str
) -> None:
    async with await psycopg.AsyncConnection.connect(database_url, connect_timeout=5, autocommit=True) as connection:
        await connection.execute("DROP SCHEMA twodoor CASCADE")
    with pytest.raises(ConfigError, match="twodoor migrate"):
        async with open_ledger(settings):
            pass
    told: list[BaseException] = []
    async with job_door(real=settings, told=told) as door:
        assert (await door.client.get("/healthz")).status_code == 200
        (error,) = told
        assert isinstance(error, ConfigError)


async def test_a_gateway_starts_without_its_ledger_and_takes_jobs_when_it_comes(
    postgres_server: Postgres, settings: JobsSettings
) -> None:
    postgres_server.freeze()
    try:
        async with job_door(real=settings) as door:
            problem(await door.lines(LINES), 503, "dependency_down")
            postgres_server.thaw()

            async def taken() -> bool:
                return (await door.lines(LINES)).status_code == 202

            await until(taken, "a job is taken")
    finally:
        postgres_server.thaw()
