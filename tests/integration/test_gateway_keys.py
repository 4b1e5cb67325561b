"""Keys at the door: odd credentials get 401 before a byte of the body is read, tenants do not see each other, limits are answered."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import GatewayFactory
from tests.integration.gateway_jobs import ACME, ADMIN, MODEL, OTHER, bearer, job_door, keys_file, problem
from tests.parts import Gateway, Triton, wait_until
from tests.rawhttp import Connection, Reply, connect, post
from tests.stubs import STUB

GOOD = json.dumps({"text": "good", "model": STUB}).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keys")
    keys_file(made, rate_rows_per_s=4)
    return made


@pytest.fixture(scope="module")
def gateway(gateway_factory: GatewayFactory, triton: Triton, folder: Path) -> Gateway:
    """A gateway with keys that listens on every address."""
    return gateway_factory(
        triton.grpc_address,
        triton.repository,
        TWODOOR_GATEWAY_KEYS_FILE=folder / "keys.jsonl",
        TWODOOR_GATEWAY_HOST="0.0.0.0",
    ).start()


@pytest.fixture
def connection(gateway: Gateway) -> Iterator[Connection]:
    with connect(gateway.port) as made:
        yield made


def ask(connection: Connection, *credentials: bytes) -> Reply:
    head, _, body = post("/predict", GOOD).partition(b"\r\n\r\n")
    lines = [head, *(b"Authorization: " + value for value in credentials)]
    connection.send(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    return connection.reply()


def refused(reply: Reply) -> bool:
    assert json.loads(reply.body)["request_id"] == reply.headers["x-request-id"]
    assert reply.headers["content-type"] == "application/problem+json"
    return (reply.status, json.loads(reply.body)["code"], reply.headers["www-authenticate"]) == (
        401, "unauthorized", "Bearer",
    )  # fmt: skip


def test_odd_credentials_are_401_and_a_right_call_after_each_is_answered(gateway: Gateway) -> None:
    key = OTHER.encode()
    wrong: list[tuple[bytes, ...]] = [
        (), (b"Bearer ",), (b"Bearer",), (b"Bearer caf\xe9",), (b"Bearer \xe2\x80\x9c" + key + b"\xe2\x80\x9d",),
        (b"Basic eDp5",), (b"a" * 65_536,), (b"Bearer " + b"a" * 65_536,), (b"Bearer " + key, b"Bearer " + key), (key,),
    ]  # fmt: skip
    for credentials in wrong:
        with connect(gateway.port) as connection:
            assert refused(ask(connection, *credentials)), credentials[:1]
        with connect(gateway.port) as connection:
            assert ask(connection, b"Bearer " + key).status == 200
    for good in (b"bearer " + key, b"BEARER  " + key):
        with connect(gateway.port) as connection:
            assert ask(connection, good).status == 200
    assert "Traceback" not in gateway.log()


def test_a_wrong_key_is_refused_before_the_body_and_without_100_continue(connection: Connection) -> None:
    head = post("/predict", b"", "Authorization: Bearer wrong", "Expect: 100-continue")
    connection.send(head.replace(b"Content-Length: 0", b"Content-Length: 10000000000"))
    assert refused(connection.reply())
    assert connection.closed_within(1)


def test_a_body_behind_a_wrong_key_never_becomes_the_next_request(gateway: Gateway) -> None:
    for path in ("/predict", f"/v1/jobs?model={MODEL}", "/nowhere"):
        with connect(gateway.port) as connection:
            connection.send(post(path, b"x" * 70_000, "Authorization: Bearer wrong"))
            assert refused(connection.reply())
            connection.send_all([post("/predict", GOOD, f"Authorization: Bearer {OTHER}")])
            assert connection.closed_within(3)


def test_only_what_shows_nothing_of_a_tenant_is_open(gateway: Gateway) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"):
        assert gateway.get(path)
    for path in ("/predict", "/v1/jobs", "/v1/admin/bulk", "/nowhere", "/healthz/", "//healthz"):
        problem(httpx.get(f"{gateway.url}{path}"), 401, "unauthorized")
    problem(httpx.get(f"{gateway.url}/nowhere", headers=bearer(OTHER)), 404, "not_found")


def test_more_rows_than_the_rate_are_429_and_tell_when_to_come(gateway: Gateway) -> None:
    url, headers = f"{gateway.url}/predict", bearer(ACME)
    answers = [httpx.post(url, json={"text": ["good"] * 4, "model": STUB}, headers=headers) for _ in range(4)]
    refused = [answer for answer in answers if answer.status_code != 200]
    first_refused = refused[0]
    members = problem(first_refused, 429, "rate_limited")
    assert members["limit"] == 4
    assert int(first_refused.headers["retry-after"]) in (1, 2)
    assert httpx.post(url, json={"text": ["good"] * 64, "model": STUB}, headers=bearer(OTHER)).status_code == 200
    assert 'twodoor_shed_total{reason="rate_limited"}' in gateway.get("/metrics").decode()
    large = json.dumps({"text": ["good"] * 12, "model": STUB})

    def send_large() -> httpx.Response:
        return httpx.post(url, content=large, headers=headers | {"content-type": "application/json"})

    first, told_s = send_large(), int(refused[-1].headers["retry-after"])
    if first.status_code != 200:  # by now there may be room already
        told_s = int(first.headers["retry-after"])
        time.sleep(told_s)
        assert send_large().status_code == 200, "a call of three seconds' rows passes at the time it was told"
    # Until then the rate has to catch up: and whoever is told after others is told to come after them.
    assert 2 <= int(httpx.post(url, json={"text": "good"}, headers=headers).headers["retry-after"]) <= 3 + told_s


def test_keys_are_read_again_on_sighup_and_a_broken_file_keeps_the_old_ones(gateway: Gateway, folder: Path) -> None:
    file = folder / "keys.jsonl"
    good = file.read_text()

    def status(key: str) -> int:
        return httpx.get(f"{gateway.url}/nowhere", headers=bearer(key)).status_code

    file.write_text("broken")
    gateway.send(signal.SIGHUP)
    wait_until(lambda: "keys not read again" in gateway.log(), "the broken file is told")
    assert status(OTHER) == 404
    assert b"\ntwodoor_keys_stale 1.0" in gateway.get("/metrics")
    file.write_text("\n".join(line for line in good.splitlines() if '"other"' not in line))
    gateway.send(signal.SIGHUP)
    wait_until(lambda: status(OTHER) == 401, "the key is gone")
    assert status(ADMIN) == 404
    assert b"\ntwodoor_keys_stale 0.0" in gateway.get("/metrics")
    file.write_text(good)
    gateway.send(signal.SIGHUP)
    wait_until(lambda: status(OTHER) == 404, "the key is back")
    assert not [key for key in (ACME, OTHER, ADMIN, "Bearer") if key in gateway.log()]


async def test_another_tenants_job_is_one_that_does_not_exist(tmp_path: Path) -> None:
    async with job_door(keys=keys_file(tmp_path)) as door:
        job = await door.submit("a", headers=bearer(ACME))
        await door.work()
        foreign, unknown = job["id"], "job_" + "0" * 32
        for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
            answers = [
                await door.client.request(
                    method, f"/v1/jobs/{job_id}{path}", headers=bearer(OTHER) | {"x-request-id": "same"}
                )
                for job_id in (foreign, unknown)
            ]
            problem(answers[0], 404, "not_found")
            assert answers[0].content == answers[1].content
        for job_id in (foreign, unknown):
            response = await door.client.get("/v1/jobs", params={"after": job_id}, headers=bearer(OTHER))
            problem(response, 404, "not_found")
        assert (await door.client.get("/v1/jobs", headers=bearer(OTHER))).json()["data"] == []
        assert (await door.client.get(f"/v1/jobs/{foreign}", headers=bearer(ACME))).status_code == 200
        problem(await door.client.get(f"/v1/jobs/{foreign}"), 401, "unauthorized")


async def test_an_idempotency_key_is_the_tenants_own(tmp_path: Path) -> None:
    async with job_door(keys=keys_file(tmp_path)) as door:
        first = await door.submit("a", headers=bearer(ACME) | {"idempotency-key": "k"})
        other = await door.submit("b", headers=bearer(OTHER) | {"idempotency-key": "k"})
        assert first["id"] != other["id"]


async def test_admin_routes_need_an_admins_key(tmp_path: Path) -> None:
    async with job_door(keys=keys_file(tmp_path)) as door:
        for method, path in (("GET", ""), ("POST", "/pause"), ("POST", "/resume")):
            url = f"/v1/admin/bulk{path}"
            problem(await door.client.request(method, url), 401, "unauthorized")
            problem(await door.client.request(method, url, headers=bearer(ACME)), 403, "forbidden")
            assert (await door.client.request(method, url, headers=bearer(ADMIN))).status_code == 200


async def test_more_queued_rows_than_the_key_allows_are_429_until_some_are_done(tmp_path: Path) -> None:
    async with job_door(keys=keys_file(tmp_path, max_queued_rows=5)) as door:
        headers = bearer(ACME) | {"content-type": "application/jsonl"}

        async def send(rows: int) -> httpx.Response:
            return await door.client.post(f"/v1/jobs?model={MODEL}", content=b'"row"\n' * rows, headers=headers)

        assert (await send(3)).status_code == 202
        for rows in (3, 6):
            response = await send(rows)
            assert problem(response, 429, "quota_exceeded")["limit"] == 5
            assert int(response.headers["retry-after"]) >= 1
        assert (await send(2)).status_code == 202
        problem(await send(1), 429, "quota_exceeded")
        await door.work()
        assert (await send(5)).status_code == 202
        assert 'twodoor_shed_total{reason="quota_exceeded"} 3.0' in (await door.client.get("/metrics")).text
        assert len([info async for info in door.objects.list("jobs/")]) == 3 + 2
