"""The client's job calls against a small job API on a real socket that breaks where a test says so."""

import gzip
import io
import json
import os
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import twodoor
from tests.unit.job_server import BROKEN, JobServer, result_lines, serving
from twodoor import AsyncClient, Client
from twodoor.config import ClientConfig
from twodoor.job_bodies import LinesBody, Options, prepared

Ask = Callable[..., Awaitable[Any]]
FIRST = f"job_{1:032x}"


@pytest.fixture
def server() -> Iterator[JobServer]:
    with serving() as state:
        yield state


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, server: JobServer) -> Ask:
    """Call a method of either client by name; what it iterates over comes as a list."""
    if request.param == "sync":

        async def call(method: str, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            with Client(server.url, **(options or {})) as client:
                answer = getattr(client, method)(*args, **kwargs)
                return list(answer) if hasattr(answer, "__next__") else answer
    else:

        async def call(method: str, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            async with AsyncClient(server.url, **(options or {})) as client:
                answer = getattr(client, method)(*args, **kwargs)
                if hasattr(answer, "__anext__"):
                    return [item async for item in answer]
                return await answer

    return call


# --- submitting


async def test_a_few_rows_travel_in_one_json_body_with_their_options(ask: Ask, server: JobServer) -> None:
    rows = ["fine", {"id": "r2", "text": "line\u2028end \ud800"}]
    job = await ask("submit_job", rows, model="m2", truncate=True, metadata={"who": "me"}, result_ttl_s=60)
    assert (job.id, job.status, job.rows.total, job.ended, job.replayed) == (FIRST, "queued", 3, False, False)
    assert job.created_at.isoformat() == "2026-01-02T03:04:05.000006+00:00"
    (asked,) = server.asked
    assert json.loads(asked.body) == {
        "model": "m2", "truncate": True, "metadata": {"who": "me"}, "result_ttl_s": 60, "inputs": rows,
    }  # fmt: skip
    assert asked.headers["content-type"] == "application/json"
    assert len(asked.headers["idempotency-key"]) >= 32


async def test_many_rows_of_a_generator_travel_as_json_lines(ask: Ask, server: JobServer) -> None:
    await ask("submit_job", ({"id": str(n), "text": "x" * 100} for n in range(5_000)), truncate=True)
    (asked,) = server.asked
    assert asked.headers["content-type"] == "application/jsonl"
    assert asked.query == {"model": "sentiment_model", "truncate": "true"}
    assert [json.loads(line)["id"] for line in asked.body.splitlines()] == [str(n) for n in range(5_000)]


@pytest.mark.parametrize("way", ["file", "gzip file", "compressed on the way", "stream from its place", "pipe"])
async def test_a_file_or_stream_arrives_byte_for_byte(ask: Ask, server: JobServer, tmp_path: Path, way: str) -> None:
    content = b'\xef\xbb\xbf"a"\r\n\n{broken\n\xff\n' * 20_000
    file = tmp_path / ("rows.jsonl.gz" if way == "gzip file" else "rows.jsonl")
    file.write_bytes(gzip.compress(content, 1) if way == "gzip file" else content)
    seen: list[tuple[int, int | None]] = []
    options: dict[str, Any] = {"on_progress": lambda *now: seen.append(now), "metadata": {"a": "b c&d"}}
    if way == "stream from its place":
        stream = io.BytesIO(b"before" + content)
        stream.seek(6)
        await ask("submit_job", stream, **options)
    elif way == "pipe":
        reader, writer = os.pipe()

        def feed() -> None:
            with os.fdopen(writer, "wb") as out:
                out.write(content)

        feeder = threading.Thread(target=feed)
        feeder.start()
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            await ask("submit_job", pipe, **options)
        feeder.join(5)
    else:
        await ask("submit_job", file, compress=way == "compressed on the way", **options)
    (asked,) = server.asked
    assert asked.body == content
    assert ("content-encoding" in asked.headers) == (way in ("gzip file", "compressed on the way"))
    assert json.loads(asked.query["metadata"]) == {"a": "b c&d"}
    assert seen[-1][0] == seen[-1][1]
    assert [now for now, _ in seen] == sorted(now for now, _ in seen)


@pytest.mark.parametrize("failure", [(BROKEN, ""), (503, "dependency_down"), (429, "rate_limited")])
async def test_a_submission_that_failed_once_is_repeated_whole_with_its_key_and_makes_one_job(
    ask: Ask, server: JobServer, tmp_path: Path, failure: tuple[int, str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'"a"\n' * 100_000)
    server.failures = [failure]
    job = await ask("submit_job", file)
    first, second = server.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.body == second.body == file.read_bytes()
    assert job.replayed == (failure[0] == BROKEN)
    assert len(server.jobs) == 1


async def test_each_submission_has_a_key_of_its_own_unless_one_is_given(ask: Ask, server: JobServer) -> None:
    for key in (None, None, "mine"):
        await ask("submit_job", ["x"], idempotency_key=key)
    keys = [asked.headers["idempotency-key"] for asked in server.asked]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


@pytest.mark.parametrize("rows", ["one string", {"text": "x"}, b"bytes", io.StringIO("x"), [1], [None], [["x"]]])
async def test_what_are_no_rows_is_refused_before_anything_is_sent(ask: Ask, server: JobServer, rows: Any) -> None:
    with pytest.raises(TypeError):
        await ask("submit_job", rows)
    assert server.asked == []


@pytest.mark.parametrize("kind", ["file", "generator", "compressed"])
def test_what_is_sent_is_never_whole_in_memory(tmp_path: Path, kind: str) -> None:
    line, count = "a" * (2**15 - 3), 2**9
    file = tmp_path / "rows.jsonl"
    with file.open("w") as out:
        out.writelines(f'"{line}"\n' for _ in range(count))
    rows: Any = (line for _ in range(count)) if kind == "generator" else file
    tracemalloc.start()
    with prepared(rows, Options("m"), kind == "compressed", None) as body:
        assert isinstance(body, LinesBody)
        sent = sum(map(len, body.pieces()))
        assert sent == sum(map(len, body.pieces())), "another try sends the same"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21
    assert kind == "compressed" or sent == file.stat().st_size == 2**24


# --- asking and waiting


async def test_waiting_ends_with_the_job_however_it_ended(ask: Ask, server: JobServer) -> None:
    server.add(1)
    server.steps, server.hold_s = ["queued", "running", "failed"], 0.01
    job = await ask("wait_job", FIRST)
    assert (job.status, job.ended) == ("failed", True)
    first, *others = server.asked
    assert "prefer" not in first.headers, "the first answer is wanted at once"
    assert all(asked.headers["prefer"] == "wait=20" for asked in others)


async def test_waiting_has_an_end_of_its_own_and_the_job_goes_on(ask: Ask, server: JobServer) -> None:
    server.add(1, "running")
    began = time.monotonic()
    with pytest.raises(twodoor.DeadlineExceeded, match=f"{FIRST} is still running"):
        await ask("wait_job", FIRST, timeout_s=0.3)
    assert 0.2 < time.monotonic() - began < 2
    assert server.jobs[FIRST]["status"] == "running"


async def test_waiting_survives_a_server_that_is_away_for_a_while(ask: Ask, server: JobServer) -> None:
    server.add(1, "completed")
    server.failures = [(503, "dependency_down"), (BROKEN, ""), (503, "overloaded")]
    assert (await ask("wait_job", FIRST)).status == "completed"
    server.failures = [(503, "dependency_down")] * 99
    with pytest.raises(twodoor.Unavailable):
        await ask("wait_job", FIRST, outage_s=0.3)


async def test_watching_shows_every_state_up_to_the_last(ask: Ask, server: JobServer) -> None:
    server.add(1)
    server.steps = ["queued", "running", "running", "completed"]
    states = [job.status for job in await ask("watch_job", FIRST, every_s=0.05)]
    assert states == ["queued", "running", "running", "completed"]
    server.steps = []
    assert [job.status for job in await ask("watch_job", FIRST)] == ["completed"]


async def test_pages_of_jobs_are_one_list(ask: Ask, server: JobServer) -> None:
    for number in range(25):
        server.add(number, "completed" if number % 2 else "queued")
    jobs = await ask("list_jobs", page_rows=10)
    assert [job.id for job in jobs] == list(server.jobs)
    assert server.count("GET", "/v1/jobs") == 3
    assert len(await ask("list_jobs", status="completed")) == 12


async def test_cancel_and_delete(ask: Ask, server: JobServer) -> None:
    server.add(1, "running")
    assert (await ask("cancel_job", FIRST)).status == "cancelling"
    server.failures = [(409, "job_not_ended")]
    with pytest.raises(twodoor.Conflict):
        await ask("delete_job", FIRST)
    assert await ask("delete_job", FIRST) is None
    with pytest.raises(twodoor.NotFound, match="no such job"):
        await ask("get_job", FIRST)


async def test_a_deletion_whose_answer_was_lost_is_done_and_an_unknown_job_is_not(ask: Ask, server: JobServer) -> None:
    server.add(1, "completed")
    server.failures = [(BROKEN, "")]
    assert await ask("delete_job", FIRST) is None
    assert server.jobs == {}
    with pytest.raises(twodoor.NotFound):
        await ask("delete_job", FIRST)


async def test_pausing_waits_until_nothing_is_in_flight(ask: Ask, server: JobServer) -> None:
    server.bulk = ["pausing", "pausing", "paused"]
    assert (await ask("pause_bulk")).state == "pausing"
    state = await ask("pause_bulk", wait_s=5)
    assert state.state == "paused"
    assert state.consumers[0]["rows_in_flight"] == 2
    with pytest.raises(twodoor.DeadlineExceeded, match="still paused"):
        await ask("resume_bulk", wait_s=0.1)
    server.bulk = ["running"]
    assert (await ask("bulk_state")).state == "running"
    assert [asked.path for asked in server.asked if asked.method == "POST"] == [
        "/v1/admin/bulk/pause", "/v1/admin/bulk/pause", "/v1/admin/bulk/resume",
    ]  # fmt: skip


async def test_an_id_stays_one_segment_of_the_path(ask: Ask, server: JobServer) -> None:
    for job_id in ("../predict", "a/b?c#d", "job é"):
        with pytest.raises(twodoor.NotFound):
            await ask("get_job", job_id)
    assert [asked.path for asked in server.asked] == [
        "/v1/jobs/..%2Fpredict",
        "/v1/jobs/a%2Fb%3Fc%23d",
        "/v1/jobs/job%20%C3%A9",
    ]
    for wrong in ("", ".", ".."):
        with pytest.raises(ValueError, match="no job id"):
            await ask("get_job", wrong)


@pytest.mark.parametrize("body", [{"hello": "world"}, [], "text", {"data": [{}], "has_more": False, "next": None}])
async def test_an_answer_of_another_program_is_named_as_such(ask: Ask, server: JobServer, body: Any) -> None:
    server.jobs[FIRST] = body
    for call in (("get_job", FIRST), ("cancel_job", FIRST)):
        if isinstance(body, dict) or call[0] == "get_job":
            with pytest.raises(twodoor.BadAnswer):
                await ask(*call)


# --- results


@pytest.mark.parametrize("ranges", [True, False])
async def test_rows_come_once_and_in_order_wherever_the_connection_breaks(
    ask: Ask, server: JobServer, ranges: bool
) -> None:
    server.add(1, "completed")
    server.results, server.ranges = result_lines(50), ranges
    server.break_after = [0, 1, 777, 1_500]
    rows = await ask("results", FIRST)
    assert [row.index for row in rows] == list(range(50))
    assert [row.id for row in rows] == [f"r{index}" for index in range(50)]
    assert rows[0].answer.label == "a"
    assert isinstance(rows[2].answer, twodoor.RowFailed)
    assert (rows[2].answer.code, rows[2].line, rows[0].line) == ("empty_text", 3, None)
    assert all(asked.headers["accept-encoding"] == "identity" for asked in server.asked)


async def test_a_break_at_the_very_end_loses_nothing(ask: Ask, server: JobServer) -> None:
    server.add(1, "completed")
    server.results = result_lines(5)
    server.break_after = [len(server.results)]
    assert [row.index for row in await ask("results", FIRST)] == list(range(5))


async def test_only_errors_and_the_finished_prefix(ask: Ask, server: JobServer) -> None:
    server.add(1, "running")
    server.results = result_lines(9)
    assert [row.index for row in await ask("results", FIRST, only_errors=True, partial=True)] == [2, 5, 8]
    assert server.asked[0].query == {"only": "errors", "partial": "true"}
    server.results = b""
    assert await ask("results", FIRST, partial=True) == []


async def test_results_before_the_end_are_a_conflict_and_a_server_that_stays_away_is_told(
    ask: Ask, server: JobServer
) -> None:
    server.add(1, "running")
    server.failures = [(409, "job_not_ended")]
    with pytest.raises(twodoor.Conflict):
        await ask("results", FIRST)
    server.failures = [(503, "dependency_down")] * 99
    with pytest.raises(twodoor.Unavailable):
        await ask("results", FIRST, outage_s=0.3)


@pytest.mark.parametrize("content", [b'{"index": 0, "output": {"label"', b"{}\n", b"no\n", b'{"index": 0}\n'])
async def test_lines_that_are_no_results_are_named_as_such(ask: Ask, server: JobServer, content: bytes) -> None:
    server.add(1, "completed")
    server.results = content
    with pytest.raises(twodoor.BadAnswer):
        await ask("results", FIRST)


async def test_a_download_that_was_cut_off_goes_on_where_it_was(ask: Ask, server: JobServer, tmp_path: Path) -> None:
    server.add(1, "completed")
    server.results = result_lines(1_000)
    server.break_after = [20_000] + [0] * 99
    file = tmp_path / "out.jsonl"
    with pytest.raises(twodoor.ConnectionLost):
        await ask("download_results", FIRST, file, outage_s=0.3)
    assert not file.exists(), "what is not whole does not look whole"
    server.break_after, server.asked = [], []
    seen: list[tuple[int, int | None]] = []
    size = len(server.results)
    assert await ask("download_results", FIRST, file, on_progress=lambda *now: seen.append(now)) == size
    assert [asked.headers["range"] for asked in server.asked] == ["bytes=20000-"]
    assert seen[-1] == (size, size)
    assert file.read_bytes() == server.results
    assert list(tmp_path.iterdir()) == [file]


async def test_the_beginning_of_one_jobs_results_is_never_taken_for_anothers(
    ask: Ask, server: JobServer, tmp_path: Path
) -> None:
    server.add(1, "completed")
    server.add(2, "completed")
    server.results, file = result_lines(100), tmp_path / "out.jsonl"
    server.break_after = [500] + [0] * 99
    with pytest.raises(twodoor.ConnectionLost):
        await ask("download_results", FIRST, file, outage_s=0.1)
    server.break_after = []
    await ask("download_results", f"job_{2:032x}", file)
    assert "range" not in server.asked[-1].headers
    assert await ask("download_results", FIRST, file, only_errors=True) < len(server.results)
    assert len(file.read_bytes().splitlines()) == 33


async def test_nothing_to_write_is_an_empty_file_and_a_refusal_is_none(
    ask: Ask, server: JobServer, tmp_path: Path
) -> None:
    server.add(1, "completed")
    assert await ask("download_results", FIRST, tmp_path / "empty", only_errors=True) == 0
    assert (tmp_path / "empty").read_bytes() == b""
    with pytest.raises(twodoor.NotFound):
        await ask("download_results", "job_x", tmp_path / "none")
    assert [file.name for file in tmp_path.iterdir()] == ["empty"]


async def test_a_reader_who_stops_early_can_go_on_with_the_client(server: JobServer) -> None:
    server.add(1, "completed")
    server.results = result_lines(10_000)
    with Client(server.url, max_connections=1) as client:
        for _ in range(3):
            assert next(client.results(FIRST)).index == 0
        assert client.get_job(FIRST).ended
    async with AsyncClient(server.url, max_connections=1) as other:
        for _ in range(3):
            async with aclosing(other.results(FIRST)) as rows:
                assert (await anext(rows)).index == 0
        assert (await other.get_job(FIRST)).ended


# --- the key


async def test_the_key_is_sent_as_a_bearer_token_and_shown_nowhere(
    ask: Ask, server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(1)
    await ask("get_job", FIRST, options={"api_key": "s3cret-key"})
    monkeypatch.setenv("TWODOOR_CLIENT_API_KEY", "from-the-environment")
    await ask("get_job", FIRST)
    tokens = [asked.headers["authorization"] for asked in server.asked]
    assert tokens == ["Bearer s3cret-key", "Bearer from-the-environment"]
    for client in (Client(server.url, api_key="s3cret-key"), AsyncClient(server.url, api_key="s3cret-key")):
        assert repr(client) == f"{type(client).__name__}('{server.url}')"
        assert "s3cret-key" not in repr(client._http) + repr(client._http.headers)
    assert "environment" not in repr(ClientConfig.from_environ())
    server.failures = [(401, "unauthorized")]
    with pytest.raises(twodoor.Unauthorized) as caught:
        await ask("get_job", FIRST)
    assert "environment" not in repr(caught.value) + str(caught.value)


@pytest.mark.parametrize("key", ["clé", "“quoted”", "two words", "line\nend", "a\r\nX-Evil: 1"])
def test_a_key_that_can_be_none_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ValueError, match="the API key holds") as caught:
        Client(api_key=key)
    assert key not in str(caught.value)
