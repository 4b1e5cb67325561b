"""The client's job calls and `submit`, `jobs`, `bulk` against the real gateway, ledger, consumer and Triton."""

import asyncio
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import twodoor
from tests.conftest import GatewayFactory
from tests.integration.gateway_jobs import ACME, ADMIN, MODEL, OTHER, job_door, keys_file
from tests.integration.test_consumer_jobs import make_consumer
from tests.parts import ROOT, Gateway, Postgres, Triton, wait_until
from twodoor import AsyncClient, Client

LABELLED = {"positive": "A wonderful evening.", "negative": "What a waste of money."}


# --- the client and the real job API; nobody works on the rows but the test


async def test_a_job_of_the_client_is_the_job_of_the_server_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'"one"\r\n\n{"id": "2", "text": "two"}\n{broken')
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    async with job_door() as door, AsyncClient(f"http://127.0.0.1:{door.port}") as client:
        told: dict[str, Any] = {"model": MODEL, "truncate": True, "metadata": {"a": "é&="}, "result_ttl_s": 60}
        jobs = [
            await client.submit_job(["one", {"id": "2", "text": "two"}, "three"], **told),
            await client.submit_job(({"text": "x" * 200} for _ in range(3_000)), **told),
            await client.submit_job(file, **told),
            await client.submit_job(packed, **told),
            await client.submit_job(file, compress=True, **told),
        ]
        assert [job.rows.total for job in jobs] == [3, 3_000, 3, 3, 3]
        assert all(job.metadata == {"a": "é&="} and job.status == "queued" for job in jobs)
        assert [job async for job in client.list_jobs(page_rows=2)] == jobs[::-1]
        assert [job async for job in client.list_jobs(status="completed")] == []
        with pytest.raises(twodoor.Conflict):
            await client.download_results(jobs[0].id, tmp_path / "early")
        assert await client.download_results(jobs[0].id, tmp_path / "empty", partial=True) == 0
        waiting = asyncio.create_task(client.wait_job(jobs[1].id, timeout_s=30))
        await door.work(failing=range(10))
        assert (await waiting).rows == twodoor.JobRows(3_000, 2_990, 10, 0)
        whole = await client.download_results(jobs[1].id, tmp_path / "out")
        lines = (tmp_path / "out").read_bytes().splitlines()
        assert [json.loads(line)["index"] for line in lines] == list(range(3_000))
        (tmp_path / f"again.{jobs[1].id}.part").write_bytes((tmp_path / "out").read_bytes()[:12_345])
        assert await client.download_results(jobs[1].id, tmp_path / "again") == whole
        assert (tmp_path / "again").read_bytes() == (tmp_path / "out").read_bytes()
        assert await client.download_results(jobs[1].id, tmp_path / "bad", only_errors=True) < whole
        await client.delete_job(jobs[1].id)
        with pytest.raises(twodoor.NotFound):
            await client.get_job(jobs[1].id)


async def test_one_key_is_one_job_and_another_request_with_it_is_refused() -> None:
    async with job_door() as door, AsyncClient(f"http://127.0.0.1:{door.port}") as client:
        first = await client.submit_job(["x"], model=MODEL, idempotency_key="k")
        again = await client.submit_job(["x"], model=MODEL, idempotency_key="k")
        assert (first.replayed, again.replayed, again.id) == (False, True, first.id)
        with pytest.raises(twodoor.Invalid) as caught:
            await client.submit_job(["y"], model=MODEL, idempotency_key="k")
        assert caught.value.code == "idempotency_mismatch"
        with pytest.raises(twodoor.Invalid):
            await client.submit_job([], model=MODEL)
        assert (await client.cancel_job(first.id)).status == "cancelling"
        with pytest.raises(twodoor.Conflict):
            await client.delete_job(first.id)


async def test_keys_decide_who_sees_a_job_and_who_may_pause(tmp_path: Path) -> None:
    async with job_door(keys=keys_file(tmp_path, max_queued_rows=2)) as door:
        url = f"http://127.0.0.1:{door.port}"
        async with AsyncClient(url) as nobody, AsyncClient(url, api_key=ACME, retries=0) as acme:
            with pytest.raises(twodoor.Unauthorized):
                await nobody.submit_job(["x"], model=MODEL)
            job = await acme.submit_job(["x", "y"], model=MODEL)
            with pytest.raises(twodoor.QuotaExceeded) as caught:
                await acme.submit_job(["z"], model=MODEL)
            assert caught.value.retry_after_s
            with pytest.raises(twodoor.Forbidden):
                await acme.pause_bulk()
        async with AsyncClient(url, api_key=OTHER) as other, AsyncClient(url, api_key=ADMIN) as admin:
            with pytest.raises(twodoor.NotFound):
                await other.get_job(job.id)
            assert (await admin.pause_bulk(wait_s=5)).state == "paused"
            assert (await admin.resume_bulk(wait_s=5)).state == "running"


# --- the command line and all real parts


@dataclass
class Doors:
    """Both doors as processes over one ledger and one folder of objects."""

    gateway: Gateway

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "twodoor", *map(str, arguments)]

    def run(self, *arguments: object, stdin: str | None = None) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "TWODOOR_CLIENT_URL": self.gateway.url}
        return subprocess.run(
            self.command(*arguments), input=stdin, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env
        )

    @contextmanager
    def start(self, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
        """Start a command; it is ended with the block, whatever happens there."""
        env = {**os.environ, "TWODOOR_CLIENT_URL": self.gateway.url}
        with subprocess.Popen(
            self.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
        ) as child:
            try:
                yield child
            finally:
                child.kill()

    def json(self, *arguments: object) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def doors(
    triton: Triton,
    postgres_server: Postgres,
    gateway_factory: GatewayFactory,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Doors]:
    url, folder = postgres_server.new_database(), tmp_path_factory.mktemp("jobs")
    gateway = gateway_factory(
        triton.grpc_address, triton.repository,
        TWODOOR_JOBS_DATABASE_URL=url, TWODOOR_JOBS_OBJECTS_URL=folder.as_uri(), TWODOOR_GATEWAY_SHUTDOWN_TIMEOUT_S=1,
    )  # fmt: skip
    # One after the other: a port is free for the next one until its owner has begun.
    gateway.start()
    consumer = make_consumer(triton, url, folder)
    try:
        consumer.start()
        wait_until(lambda: gateway.get("/readyz").count(b'"up"') == 3, "the gateway sees all its parts")
        yield Doors(gateway)
    finally:
        consumer.stop()
        gateway.stop()
        postgres_server.drop_database(url)


def write_rows(file: Path, count: int) -> None:
    texts = list(LABELLED.values())
    lines = [json.dumps({"id": f"r{number}", "text": texts[number % 2]}) for number in range(count)]
    file.write_text("\n".join([*lines, '""', "{broken"]))


def test_submit_wait_output_gives_each_row_what_predict_says(doors: Doors, tmp_path: Path) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(file, 50)
    done = doors.run("submit", file, "--wait", "--output", out, "--metadata", "who=me")
    assert done.returncode == 0, done.stderr
    assert "completed: 52 rows, 50 succeeded, 2 failed" in done.stdout
    assert "2 rows have no answer" in done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(52))
    assert [row.get("id") for row in rows] == [*(f"r{number}" for number in range(50)), None, None]
    assert [row["output"]["label"] for row in rows[:50]] == list(LABELLED) * 25
    assert [(row["error"]["code"], row["error"]["line"]) for row in rows[50:]] == [
        ("empty_text", 51), ("invalid_json", 52),
    ]  # fmt: skip
    job = doors.json("jobs", "list", "--max", "1")
    assert job["metadata"] == {"who": "me"}
    with Client(doors.gateway.url) as client:
        (predicted,) = client.predict_many([LABELLED["positive"]]).rows
        first, *_ = client.results(job["id"])
        bad = list(client.results(job["id"], only_errors=True))
    assert isinstance(predicted, twodoor.Prediction)
    assert isinstance(first.answer, twodoor.Prediction)
    assert first.answer.score == pytest.approx(predicted.score, abs=1e-3)
    assert [row.index for row in bad] == [50, 51]
    assert doors.run("jobs", "results", job["id"]).stdout.count("\n") == 52
    assert doors.run("jobs", "delete", job["id"]).returncode == 0
    assert doors.run("jobs", "show", job["id"]).returncode == 1


def test_a_pause_holds_a_job_until_it_is_resumed_and_ctrl_c_only_ends_the_waiting(doors: Doors, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, 200)
    assert doors.json("bulk", "pause", "--wait")["state"] == "paused"
    with doors.start("submit", file, "--wait") as waiting:
        assert waiting.stderr is not None
        job_id = waiting.stderr.readline().split()[-1]
        waiting.send_signal(signal.SIGINT)
        assert f"twodoor jobs show {job_id} --wait" in waiting.communicate(timeout=20)[1]
    assert waiting.returncode == 1
    assert doors.json("jobs", "show", job_id)["rows"]["pending"] == 202
    assert doors.json("bulk", "status")["state"] == "paused"
    assert doors.json("bulk", "resume", "--wait")["state"] == "running"
    assert doors.run("jobs", "show", job_id, "--wait").returncode == 0
    assert doors.json("jobs", "cancel", job_id)["status"] == "completed", "too late, and no error"


def asked_for_jobs(gateway: Gateway) -> int:
    """Return how often the gateway has shown a job."""
    text = gateway.get("/metrics").decode()
    found = re.search(r'_count\{code="200",route="/v1/jobs/\{job_id\}"\} ([0-9.]+)', text)
    return int(float(found[1])) if found else 0


def test_waiting_survives_a_gateway_that_is_killed_and_comes_back(doors: Doors, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, 300)
    assert doors.json("bulk", "pause", "--wait")["state"] == "paused"
    job_id = doors.run("submit", file).stdout.strip()
    before = asked_for_jobs(doors.gateway)
    with doors.start("jobs", "show", job_id, "--wait", "--json") as waiting:
        wait_until(lambda: asked_for_jobs(doors.gateway) > before, "it waits")
        doors.gateway.kill()
        doors.gateway.start()
        assert doors.json("bulk", "resume")["state"] == "running"
        content, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert json.loads(content)["rows"] == {"total": 302, "succeeded": 300, "failed": 2, "pending": 0}
