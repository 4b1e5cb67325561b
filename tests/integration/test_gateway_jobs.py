"""What a caller of the job API gets for what it sends: one answer for each good and bad use, over stores in memory."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from gateway.job_door import Stores
from gateway.jobs_routes import ROUTES
from jobs.ledger import input_key
from jobs.memory import MemoryLedger
from jobs.objects import Objects, memory_objects
from tests.integration.gateway_jobs import MODEL, Door, job_door, memory_stores, problem, rows_of
from tests.rawhttp import Connection, connect, post
from tests.stubs import STUB

LINES = b'"good"\n{"id": "r2", "text": "bad"}\n'
UNKNOWN_IDS = ("job_" + "0" * 32, "job_" + "A" * 32, "job_", "x", "job_" + "0" * 33, "%00", "job_" + "0" * 31 + "é")


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with job_door() as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[Door]:
    """A door of which everything asked is refused, so that many may share it."""
    async with job_door() as opened:
        yield opened


shared = pytest.mark.asyncio(loop_scope="module")


async def nothing_kept(door: Door) -> None:
    """Check that a refused submission left neither a job, nor an object, nor an open upload."""
    assert (await door.client.get("/v1/jobs")).json()["data"] == []
    assert [info.key async for info in door.objects.list("jobs/")] == []
    assert isinstance(door.ledger, MemoryLedger)
    assert door.ledger._state.uploads == {}


async def test_a_job_of_json_is_accepted_and_shown(door: Door) -> None:
    body = {
        "model": MODEL, "inputs": ["good", {"id": "r2", "text": "bad"}, 5, None, ""], "truncate": True,
        "metadata": {"run": "night\u2028ly"}, "completion_window_s": 60, "result_ttl_s": 600,
    }  # fmt: skip
    response = await door.client.post("/v1/jobs", json=body, headers={"x-request-id": "r-1"})
    assert response.status_code == 202
    job = response.json()
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert "idempotent-replayed" not in response.headers
    assert job["status"] == "queued"
    assert job["rows"] == {"total": 5, "succeeded": 0, "failed": 0, "pending": 5}
    assert (job["progress"], job["metadata"], job["model_version"]) == (0, {"run": "night\u2028ly"}, None)
    assert b"\xe2\x80\xa8" not in response.content
    assert await door.job(job["id"]) == job
    await door.work(failing=[2, 3, 4])
    done = await door.job(job["id"])
    assert (done["status"], done["model_version"], done["progress"]) == ("completed", "1", 1)
    assert done["rows"] == {"total": 5, "succeeded": 2, "failed": 3, "pending": 0}
    for moment in ("created_at", "started_at", "finished_at", "deadline_at", "expires_at"):
        assert done[moment].endswith("Z")


@pytest.mark.parametrize("kind", ["application/jsonl", "application/x-ndjson; charset=UTF-8"])
async def test_a_job_of_lines_is_stored_as_it_was_sent_plain_and_gzipped(door: Door, kind: str) -> None:
    packed = gzip.compress(LINES[:7]) + gzip.compress(LINES[7:])
    for body, headers in ((LINES, {}), (packed, {"content_encoding": "gzip"})):
        response = await door.lines(body, f"model={MODEL}&truncate=true", content_type=kind, **headers)
        job = response.json()
        assert (response.status_code, job["rows"]["total"]) == (202, 2)
        assert await door.objects.get(input_key(job["id"])) == LINES


async def test_broken_lines_are_accepted_and_blank_ones_counted_nowhere(door: Door) -> None:
    lines = [
        b'\xef\xbb\xbf"first"\r\n', b"\r\n", b"\n", b"not json\n", b'"\xff\xfe"\n', b" \t\r\n",
        '"a\u2028b\x85c\u2029d"\n'.encode(), b'"' + b"x" * 10_000_000 + b'"\n', b"9" * 5000 + b"\n",
        b'{"id": "\\u0000", "text": "nul in the id"}\n', b'"no newline at the end"',
    ]  # fmt: skip
    response = await door.lines(b"".join(lines))
    assert response.status_code == 202
    assert response.json()["rows"]["total"] == 8


@shared
@pytest.mark.parametrize("body", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
async def test_a_body_without_a_row_is_422_and_no_job(refusing: Door, body: bytes) -> None:
    problem(await refusing.lines(body), 422, "empty_input")
    await nothing_kept(refusing)


@shared
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"inputs": ["a"]}, "model"),
        ({"model": 5, "inputs": ["a"]}, "model"),
        ({"model": "", "inputs": ["a"]}, "model"),
        ({"model": MODEL}, "inputs"),
        ({"model": MODEL, "inputs": "a"}, "inputs"),
        ({"model": MODEL, "input_object": "imports/default/x"}, "input_object"),
        ({"model": MODEL, "inputs": ["a"], "truncate": "yes"}, "truncate"),
        ({"model": MODEL, "inputs": ["a"], "metadata": {"a": "nul \0"}}, "metadata"),
        ({"model": MODEL, "inputs": ["a"], "metadata": {"a": 1}}, "metadata"),
        ({"model": MODEL, "inputs": ["a"], "completion_window_s": 0}, "completion_window_s"),
        ({"model": MODEL, "inputs": ["a"], "result_ttl_s": 10**12}, "result_ttl_s"),
        ({"model": MODEL, "inputs": ["a"], "colour": "red"}, "colour"),
        (["a"], "body"),
    ],
)
async def test_a_wrong_field_is_422_and_named(refusing: Door, body: Any, field: str) -> None:
    members = problem(await refusing.client.post("/v1/jobs", json=body), 422, "invalid_request")
    assert members["field"] == field
    await nothing_kept(refusing)


@shared
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "model"), ("model=", "model"), ("model=a&model=b", "model"), ("model=a&colour=red", "colour"),
        ("model=a&truncate=perhaps", "truncate"), ("model=a&metadata=%7B", "metadata"), ("model=%ff", "query"),
        ("model=a&result_ttl_s=x", "result_ttl_s"), ("&".join(["model=a"] * 20), "query"),
    ],
)  # fmt: skip
async def test_a_wrong_query_of_a_jsonl_body_is_422_and_named(refusing: Door, query: str, field: str) -> None:
    assert problem(await refusing.lines(LINES, query), 422, "invalid_request")["field"] == field
    await nothing_kept(refusing)


async def test_json_that_is_none_and_a_query_beside_json_are_refused(door: Door) -> None:
    json_type = {"content-type": "application/json"}
    problem(await door.client.post("/v1/jobs", content=b"{", headers=json_type), 422, "invalid_json")
    problem(await door.client.post("/v1/jobs", content=b"", headers=json_type), 422, "invalid_json")
    body = json.dumps({"model": MODEL, "inputs": ["a"]})
    problem(await door.client.post("/v1/jobs?model=x", content=body, headers=json_type), 400, "invalid_request")
    await nothing_kept(door)


@shared
@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=latin-1", "multipart/form-data", ""])
async def test_another_content_type_is_415_and_says_what_is_taken(refusing: Door, kind: str) -> None:
    response = await refusing.lines(LINES, content_type=kind)
    problem(response, 415, "unsupported_media_type")
    assert "application/jsonl" in response.headers["accept"]
    response = await refusing.lines(LINES, content_encoding="zstd")
    problem(response, 415, "unsupported_encoding")


async def test_a_body_over_its_limit_is_413_and_no_job_however_it_is_sent() -> None:
    limits = {"max_job_body_bytes": 100_000, "max_job_json_bytes": 2_000}
    line = b'"' + b"x" * 997 + b'"\n'

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield line

    async with job_door(**limits) as door:
        assert (await door.lines(line * 100)).status_code == 202
        assert (await door.lines(gzip.compress(line * 100), content_encoding="gzip")).status_code == 202
        before = (await door.client.get("/v1/jobs")).json()
        bomb = gzip.compress(line * 50_000)
        for body, headers in ((line * 101, {}), (pieces(), {}), (bomb, {"content_encoding": "gzip"})):
            members = problem(await door.lines(body, **headers), 413, "body_too_large")
            assert members["limit"] == 100_000
        response = await door.client.post("/v1/jobs", json={"model": MODEL, "inputs": ["x" * 2_000]})
        assert problem(response, 413, "body_too_large")["limit"] == 2_000
        assert (await door.client.get("/v1/jobs")).json() == before
        assert len([info async for info in door.objects.list("jobs/")]) == 2


@shared
@pytest.mark.parametrize(
    "body",
    [gzip.compress(LINES)[:-9], b"no gzip", gzip.compress(LINES) + b"junk"],
    ids=["cut", "no gzip", "more follows"],
)
async def test_a_body_that_is_not_the_gzip_it_says_is_400_and_no_job(refusing: Door, body: bytes) -> None:
    problem(await refusing.lines(body, content_encoding="gzip"), 400, "invalid_body")
    await nothing_kept(refusing)


def lines_request(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """The bytes of a JSONL submission, whose Content-Length may lie."""
    request = post(f"/v1/jobs?model={MODEL}", body, *headers, content_type="application/jsonl")
    return request if length is None else request.replace(b"Length: %d" % len(body), b"Length: %d" % length)


async def raw(door: Door, work: Any) -> Any:
    """Run work with a raw connection in a thread: the server is in this loop."""

    def run() -> Any:
        with connect(door.port) as connection:
            return work(connection)

    return await asyncio.to_thread(run)


async def test_a_cut_upload_is_no_job_and_leaves_nothing(door: Door) -> None:
    for part in (b"", LINES, b'"x"\n' * 200_000):
        await raw(door, lambda connection, part=part: connection.send(lines_request(part, length=10**7)))
    await asyncio.sleep(0.05)  # so that the server has seen the cuts begin; what follows polls
    for _ in range(200):
        keys = [info.key async for info in door.objects.list("jobs/")]
        if not keys and not door.ledger._state.uploads:  # type: ignore[attr-defined]
            break
        await asyncio.sleep(0.02)
    await nothing_kept(door)
    assert (await door.lines(LINES)).status_code == 202


async def test_chunks_that_are_none_are_400_and_no_job(door: Door) -> None:
    head = f"POST /v1/jobs?model={MODEL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/jsonl\r\n"

    def send(connection: Connection) -> int:
        connection.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n7\r\n" + LINES[:7] + b"\r\nzz\r\n")
        return connection.reply().status

    assert await raw(door, send) == 400
    await asyncio.sleep(0.05)
    await nothing_kept(door)


async def test_an_upload_may_be_slow_but_not_pause() -> None:
    async with job_door(upload_idle_timeout_s=0.4, body_timeout_s=0.2, min_transfer_bytes_per_s=20) as door:

        async def slow(pause_s: float) -> AsyncIterator[bytes]:
            for row in range(4):
                yield b'"row %d"\n' % row
                await asyncio.sleep(pause_s)

        assert (await door.lines(slow(0.15), x_timeout_ms="100")).status_code == 202
        reply = await raw(
            door, lambda connection: (connection.send(lines_request(LINES, length=50)), connection.reply())
        )
        assert (reply[1].status, json.loads(reply[1].body)["code"]) == (408, "body_timeout")
        assert len((await door.client.get("/v1/jobs")).json()["data"]) == 1


async def test_a_caller_that_ends_its_side_in_the_middle_of_a_body_is_told(door: Door) -> None:
    for request in (
        lines_request(LINES, length=10**7),
        lines_request(LINES).replace(b"Content-Length: %d" % len(LINES), b"Transfer-Encoding: chunked")[: -len(LINES)]
        + b"%x\r\n%s\r\n" % (len(LINES), LINES),
    ):

        def cut(connection: Connection, request: bytes = request) -> Any:
            connection.send(request)
            connection.sock.shutdown(socket.SHUT_WR)
            return connection.reply()

        reply = await raw(door, cut)
        assert (reply.status, json.loads(reply.body)["code"]) == (400, "invalid_body")
    assert (await door.client.get("/v1/jobs")).json()["data"] == []


async def test_bodies_of_jobs_that_wait_for_a_store_do_not_turn_predict_away() -> None:
    class Slow(MemoryLedger):
        """Opens no upload until it is told to."""

        asked, going = 0, asyncio.Event()

        async def open_upload(self, job_id: str, tenant: str, key: str, ttl_s: float) -> None:
            self.asked += 1
            await self.going.wait()
            await super().open_upload(job_id, tenant, key, ttl_s)

    ledger = Slow()
    async with job_door(Stores(ledger, memory_objects()), max_buffered_bytes=2**20) as door:
        waiting = [asyncio.create_task(door.submit("a" * 2**18)) for _ in range(3)]
        while ledger.asked < 3:
            await asyncio.sleep(0.01)
        response = await door.client.post("/predict", json={"text": "a" * 2**19})
        problem(response, 503, "dependency_down")  # of Triton, which is away: not overloaded
        problem(await door.client.post("/v1/jobs", json={"model": MODEL, "inputs": ["a" * 2**19]}), 503, "overloaded")
        ledger.going.set()
        await asyncio.gather(*waiting)


async def test_so_many_uploads_at_one_time_and_no_more() -> None:
    async with job_door(max_uploads=2) as door:
        going = asyncio.Event()

        async def held() -> AsyncIterator[bytes]:
            yield LINES
            await going.wait()

        first = [asyncio.create_task(door.lines(held())) for _ in range(2)]
        while len(door.ledger._state.uploads) < 2:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        response = await door.lines(LINES)
        problem(response, 503, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert 'twodoor_shed_total{reason="uploads"} 1.0' in (await door.client.get("/metrics")).text
        going.set()
        assert [response.status_code for response in await asyncio.gather(*first)] == [202, 202]
        assert (await door.lines(LINES)).status_code == 202


async def test_the_same_key_and_request_give_the_same_job_and_another_request_is_refused(door: Door) -> None:
    first = await door.lines(LINES, idempotency_key="k 1")
    again = await door.lines(gzip.compress(LINES), idempotency_key="k 1", content_encoding="gzip")
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["location"] == first.headers["location"]
    for body, query in ((LINES + b'"more"', f"model={MODEL}"), (LINES, f"model={MODEL}&truncate=true")):
        problem(await door.lines(body, query, idempotency_key="k 1"), 422, "idempotency_mismatch")
    assert (await door.lines(LINES, idempotency_key="x" * 255)).json()["id"] != first.json()["id"]
    assert len((await door.client.get("/v1/jobs")).json()["data"]) == 2
    assert len([info async for info in door.objects.list("jobs/")]) == 2


@shared
@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9", "a\tb"])
async def test_an_idempotency_key_that_is_none_is_422(refusing: Door, key: str) -> None:
    headers = {"content-type": "application/jsonl", "idempotency-key": key.encode("latin-1")}
    response = await refusing.client.post(f"/v1/jobs?model={MODEL}", content=LINES, headers=headers)
    assert problem(response, 422, "invalid_request")["field"] == "header Idempotency-Key"


@shared
@pytest.mark.parametrize("job_id", UNKNOWN_IDS)
async def test_what_is_no_job_is_404_at_every_route(refusing: Door, job_id: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/results"), ("POST", "/cancel")):
        problem(await refusing.client.request(method, f"/v1/jobs/{job_id}{path}"), 404, "not_found")
    problem(await refusing.client.get("/v1/jobs", params={"after": job_id}), 404, "not_found")


async def test_another_method_is_405_and_says_which_there_are(door: Door) -> None:
    response = await door.client.put("/v1/jobs")
    problem(response, 405, "method_not_allowed")
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
    problem(await door.client.get("/v1/jobs/"), 404, "not_found")
    problem(await door.client.get("/v1/jobs/job_x/output"), 404, "not_found")


async def test_pages_over_jobs_of_one_instant_show_each_job_once() -> None:
    moment = (MemoryLedger())._state.clock()
    async with job_door(Stores(MemoryLedger(clock=lambda: moment), memory_objects())) as door:
        made = {(await door.submit("a"))["id"] for _ in range(25)}
        seen: list[str] = []
        has_more, after = [], ""
        while not has_more or has_more[-1]:
            page = (await door.client.get("/v1/jobs", params={"limit": 10, "after": after})).json()
            seen += [job["id"] for job in page["data"]]
            has_more.append(page["has_more"])
            after = page["next"]
        assert has_more == [True, True, False]
        assert after is None
        assert (len(seen), set(seen)) == (25, made)
        assert seen == sorted(seen, reverse=True)
        default = (await door.client.get("/v1/jobs")).json()
        assert len(default["data"]) == 20
        # The cursor's job is deleted between two pages.
        await door.work()
        cursor = seen[9]
        assert (await door.client.delete(f"/v1/jobs/{cursor}")).status_code == 204
        page = (await door.client.get("/v1/jobs", params={"after": cursor, "limit": 100})).json()
        assert [job["id"] for job in page["data"]] == seen[10:]


async def test_a_list_can_be_of_one_status(door: Door) -> None:
    ended = await door.submit("a")
    await door.work()
    waiting = await door.submit("b")
    for status, jobs in (("queued", [waiting]), ("completed", [ended]), ("failed", []), ("", [waiting, ended])):
        page = (await door.client.get("/v1/jobs", params={"status": status})).json()
        assert [job["id"] for job in page["data"]] == [job["id"] for job in jobs]


@shared
@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=-1", "limit=101", "limit=x", "limit=1.5", "limit=5&limit=5", "status=done", "status=expiring", "x=1", "%ff=1"],
)  # fmt: skip
async def test_a_wrong_list_query_is_400(refusing: Door, query: str) -> None:
    problem(await refusing.client.get(f"/v1/jobs?{query}"), 400, "invalid_request")


async def test_waiting_ends_with_the_job_or_with_the_time(door: Door) -> None:
    job = await door.submit()
    waited = await door.client.get(f"/v1/jobs/{job['id']}", headers={"prefer": "respond-async, wait=0"})
    assert (waited.json()["status"], waited.headers["preference-applied"]) == ("queued", "wait=0")
    waiting = asyncio.create_task(door.client.get(f"/v1/jobs/{job['id']}", headers={"prefer": 'Wait = "20"; x=1'}))
    await asyncio.sleep(0.15)
    assert not waiting.done()
    await door.work()
    response = await asyncio.wait_for(waiting, 5)
    assert (response.json()["status"], response.headers["preference-applied"]) == ("completed", "wait=20")
    for other in ("wait", "wait=x", "wait=-1", "wait=1.5", "respond-async", "", "wait=9999999999"):
        response = await door.client.get(f"/v1/jobs/{job['id']}", headers={"prefer": other})
        assert response.status_code == 200
        assert "preference-applied" not in response.headers
    problem(await door.client.get(f"/v1/jobs/{UNKNOWN_IDS[0]}", headers={"prefer": "wait=20"}), 404, "not_found")


async def test_a_wait_is_no_longer_than_the_longest_and_a_caller_who_leaves_ends_it() -> None:
    async with job_door(max_wait_s=1) as door:
        job = await door.submit()
        waited = await door.client.get(f"/v1/jobs/{job['id']}", headers={"prefer": "wait=600"})
        assert (waited.json()["status"], waited.headers["preference-applied"]) == ("queued", "wait=1")
    async with job_door(max_wait_s=600) as door:
        job = await door.submit()
        request = f"GET /v1/jobs/{job['id']} HTTP/1.1\r\nHost: x\r\nPrefer: wait=600\r\n\r\n".encode()
        await raw(door, lambda connection: connection.send(request))
        for _ in range(250):
            metrics = (await door.client.get("/metrics")).text
            if 'twodoor_shed_total{reason="caller_gone"} 1.0' in metrics:
                break
            await asyncio.sleep(0.02)
        assert 'count{code="499",route="/v1/jobs/{job_id}"} 1.0' in metrics


async def test_cancel_begins_once_and_changes_nothing_later(door: Door) -> None:
    job = await door.submit(*["row"] * 5)
    first = await door.client.post(f"/v1/jobs/{job['id']}/cancel", headers={"x-request-id": "cancel-1"})
    again = await door.client.post(f"/v1/jobs/{job['id']}/cancel")
    assert (first.status_code, first.json()["status"]) == (202, "cancelling")
    assert (again.status_code, again.json()["status"]) == (200, "cancelling")
    problem(await door.client.delete(f"/v1/jobs/{job['id']}"), 409, "job_not_ended")
    await door.work()
    after = await door.client.post(f"/v1/jobs/{job['id']}/cancel")
    assert (after.status_code, after.json()["status"]) == (200, "cancelled")
    assert after.json()["rows"] == {"total": 5, "succeeded": 0, "failed": 5, "pending": 0}
    assert len(rows_of((await door.client.get(f"/v1/jobs/{job['id']}/results")).content)) == 5


async def test_a_running_job_is_not_deleted_and_an_ended_one_is_gone(door: Door) -> None:
    job = await door.submit()
    problem(await door.client.delete(f"/v1/jobs/{job['id']}"), 409, "job_not_ended")
    await door.work()
    response = await door.client.delete(f"/v1/jobs/{job['id']}")
    assert (response.status_code, response.content) == (204, b"")
    problem(await door.client.delete(f"/v1/jobs/{job['id']}"), 404, "not_found")
    problem(await door.client.get(f"/v1/jobs/{job['id']}/results"), 404, "not_found")
    assert (await door.client.get("/v1/jobs")).json() == {"data": [], "has_more": False, "next": None}


async def test_each_transition_a_caller_causes_is_one_log_line_with_its_request(door: Door) -> None:
    with capture_logs() as logs:
        job = await door.submit("a", headers={"x-request-id": "r-submit"})
        url = f"/v1/jobs/{job['id']}"
        for _ in range(2):
            await door.client.post(f"{url}/cancel", headers={"x-request-id": "r-cancel"})
        await door.work()
        await door.client.delete(url, headers={"x-request-id": "r-delete"})
    told = [entry for entry in logs if entry.get("job") == job["id"]]
    names = ("event", "from_status", "to_status", "tenant", "request_id")
    assert [tuple(entry.get(name) for name in names) for entry in told] == [
        ("job", None, "queued", "default", "r-submit"),
        ("job", "queued", "cancelling", "default", "r-cancel"),
        ("job_deleted", None, None, "default", "r-delete"),
    ]


async def test_pause_and_resume_may_be_said_twice(door: Door) -> None:
    assert (await door.client.get("/v1/admin/bulk")).json()["state"] == "running"
    for path, state in (("resume", "running"), ("pause", "paused"), ("pause", "paused"), ("resume", "running")):
        response = await door.client.post(f"/v1/admin/bulk/{path}")
        assert (response.status_code, response.json()["state"]) == (200, state)
    await door.client.post("/v1/admin/bulk/pause")
    await door.ledger.renew("consumer-1", {}, 0, 32, 30)
    response = await door.client.get("/v1/admin/bulk")
    assert response.json()["state"] == "pausing"
    (consumer,) = response.json()["consumers"]
    assert (consumer["id"], consumer["epoch"], consumer["rows_in_flight"]) == ("consumer-1", 0, 32)


async def test_with_triton_there_an_unknown_model_and_a_bulk_twin_are_404(triton: Any) -> None:
    async with job_door(triton=triton) as door:
        for model in ("nowhere", f"{MODEL}_bulk", "é"):
            response = await door.client.post("/v1/jobs", json={"model": model, "inputs": ["a"]})
            assert problem(response, 404, "unknown_model")["field"] == "model"
        problem(await door.lines(LINES, "model=nowhere"), 404, "unknown_model")
        await nothing_kept(door)
        assert (await door.submit("a", model=STUB))["model"] == STUB


async def test_a_door_without_jobs_has_no_such_routes() -> None:
    async with job_door(stores=None, without_jobs=True) as door:
        for method, path in (("POST", "/v1/jobs"), ("GET", f"/v1/jobs/{UNKNOWN_IDS[0]}"), ("GET", "/v1/admin/bulk")):
            problem(await door.client.request(method, path), 404, "not_found")
        assert (await door.client.get("/readyz")).json() == {"dependencies": {"triton": "down"}}
        assert "/v1/jobs" not in (await door.client.get("/openapi.json")).text
        assert "/v1/jobs" not in (await door.client.get("/docs")).text


async def test_the_documents_and_the_metrics_know_the_routes_and_no_ids(door: Door) -> None:
    job = await door.submit()
    await door.client.get(f"/v1/jobs/{job['id']}")
    await door.client.get("/v1/jobs/anything/else")
    metrics = (await door.client.get("/metrics")).text
    for route, code in (("/v1/jobs", 202), ("/v1/jobs/{job_id}", 200), ("other", 404)):
        assert f'count{{code="{code}",route="{route}"}} 1.0' in metrics
    assert job["id"] not in metrics
    assert "anything" not in metrics
    paths = (await door.client.get("/openapi.json")).json()["paths"]
    assert {"get", "post"} <= set(paths["/v1/jobs"])
    told = {(path, method) for path, operations in paths.items() for method in operations}
    there = {(route.path, method.lower()) for route in ROUTES for method in route.methods or ()}
    assert {one for one in there if one[1] != "head"} <= told
    assert "Idempotency-Key" in json.dumps(paths["/v1/jobs"])
    assert "/v1/admin/bulk/pause" in (await door.client.get("/docs")).text
    assert (await door.client.get("/readyz")).json()["dependencies"] == {
        "triton": "down", "postgres": "up", "objects": "up",
    }  # fmt: skip


async def test_an_object_store_that_is_away_is_503_and_no_job() -> None:
    class Away(Objects):
        """Answers nothing; the fault of a real one is in the tests of the stores."""

        def writer(self, key: str) -> Any:
            from serving.errors import DependencyDown

            raise DependencyDown("the object store does not answer")

    stores = memory_stores()
    async with job_door(Stores(stores.ledger, Away(stores.objects._store, 5))) as door:
        response = await door.lines(LINES)
        problem(response, 503, "dependency_down")
        assert int(response.headers["retry-after"]) >= 1
        await nothing_kept(door)


async def test_two_with_one_key_at_one_time_make_one_job(door: Door) -> None:
    async def half(first: asyncio.Event) -> AsyncIterator[bytes]:
        yield LINES[:7]
        await first.wait()
        yield LINES[7:]

    both = asyncio.Event()
    going = [asyncio.create_task(door.lines(half(both), idempotency_key="race")) for _ in range(2)]
    while len(door.ledger._state.uploads) < 2:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
    both.set()
    answers: list[httpx.Response] = await asyncio.gather(*going)
    assert [response.status_code for response in answers] == [202, 202]
    assert len({response.json()["id"] for response in answers}) == 1
    assert sorted("idempotent-replayed" in response.headers for response in answers) == [False, True]
    assert len([info async for info in door.objects.list("jobs/")]) == 1
    assert door.ledger._state.uploads == {}  # type: ignore[attr-defined]
