"""Many at once: a thousand callers, ten thousand connections, and callers who come back when they were told to."""

import asyncio
import json
import re
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.herd import Crowd, Herd, call_at_once, raise_file_limit
from tests.conftest import GatewayFactory
from tests.parts import Gateway, Triton, wait_until
from tests.rawhttp import Reply, connect, post
from tests.stubs import STUB, stub_score

KB, MB = 2**10, 2**20
TIMEOUT_S = 60.0
CONNECTIONS = 10_000
FEW_FILES = 400
ROWS = 60
CONNECTION_BOUND = 250


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """Let the test hold as many connections as the hard limit lets it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def gateway(gateway_process: Gateway) -> Gateway:
    """The shared gateway, with its default bounds."""
    return gateway_process


@pytest.fixture(scope="module")
def narrow(gateway_factory: GatewayFactory, triton: Triton) -> Gateway:
    """A gateway that takes on few rows and few connections."""
    return gateway_factory(
        triton.grpc_address,
        triton.repository,
        TWODOOR_GATEWAY_MAX_ADMITTED_ROWS=ROWS,
        TWODOOR_GATEWAY_MAX_CONNECTIONS=CONNECTION_BOUND,
    ).start()


def request(text: str) -> bytes:
    return post("/predict", json.dumps({"text": text, "model": STUB}).encode())


def text_of(caller: int) -> str:
    return f"caller number {caller} says so"


def herd(gateway: Gateway, callers: int, *, tries: int = 1) -> Herd:
    requests = [request(text_of(caller)) for caller in range(callers)]
    return asyncio.run(call_at_once(("127.0.0.1", gateway.port), requests, TIMEOUT_S, tries=tries))


def warm(gateway: Gateway) -> int:
    """Send some calls, so that what is opened once is open; returns the open files."""
    assert herd(gateway, 40).statuses() == Counter({"200": 40})
    wait_until(lambda: gauge(gateway, "twodoor_open_connections") == 1, "the callers are gone")
    return open_files(gateway)


def gauge(gateway: Gateway, name: str) -> float:
    found = re.search(rf"(?m)^{name} (\S+)$", gateway.get("/metrics").decode())
    assert found, name
    return float(found.group(1))


def open_files(gateway: Gateway) -> int:
    return len(list(Path(f"/proc/{gateway.child.pid}/fd").iterdir()))


def resident_bytes(gateway: Gateway) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{gateway.child.pid}/status").read_text())
    assert found
    return int(found.group(1)) * 1024


def assert_as_before(gateway: Gateway, files: int) -> None:
    """Nothing of a herd is left: no rows, no tokens, no open file; and the next caller gets its answer."""
    for name in ("twodoor_admitted_rows", "twodoor_admitted_tokens"):
        assert gauge(gateway, name) == 0
    wait_until(lambda: open_files(gateway) <= files, "files are closed")
    with connect(gateway.port) as connection:
        connection.send(request("as before"))
        assert connection.reply().status == 200
    assert "Traceback" not in gateway.log()


def test_a_thousand_callers_at_once_all_get_their_own_answer(gateway: Gateway) -> None:
    files, memory = warm(gateway), resident_bytes(gateway)
    seen = herd(gateway, 1_000)
    assert seen.statuses() == Counter({"200": 1_000})
    for caller in range(0, 1_000, 83):
        score = json.loads(seen.callers[caller][0].body)["score"]
        assert score == pytest.approx(stub_score(text_of(caller)), abs=1e-3)
    assert_as_before(gateway, files)
    assert resident_bytes(gateway) - memory < 100 * MB


def test_callers_over_the_bound_are_told_when_to_come_and_get_their_answer_then(narrow: Gateway) -> None:
    files = warm(narrow)
    seen = herd(narrow, 200, tries=2)
    assert not seen.faults
    first, second = seen.statuses(0), seen.statuses(1)
    assert first["200"] >= ROWS
    assert first["503"] >= 1
    assert second["200"] >= 0.95 * first["503"]
    assert_as_before(narrow, files)


def test_ten_thousand_open_connections_keep_nobody_from_an_answer(gateway: Gateway) -> None:
    files, memory = warm(gateway), resident_bytes(gateway)
    count = min(CONNECTIONS, raise_file_limit() - 200)
    if count < CONNECTIONS:
        print(f"the hard limit of open files is low: {count} connections instead of {CONNECTIONS}")

    async def crowded() -> tuple[int, Herd]:
        address = ("127.0.0.1", gateway.port)
        async with Crowd(address) as crowd:
            await crowd.grow(count, TIMEOUT_S)
            seen = await call_at_once(address, [request(text_of(caller)) for caller in range(50)], TIMEOUT_S)
            assert resident_bytes(gateway) - memory < count * 24 * KB
            return crowd.open, seen

    still_open, seen = asyncio.run(crowded())
    assert seen.statuses() == Counter({"200": 50})
    assert still_open == count
    assert_as_before(gateway, files)


def test_a_connection_over_the_bound_is_told_when_to_come_and_one_that_rests_makes_room(narrow: Gateway) -> None:
    files = warm(narrow)
    call = request("in the middle of its body")
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(narrow.port)) for _ in range(CONNECTION_BOUND)]
        for connection in busy:
            connection.send(call[:-5])
        wait_until(lambda: refusal(narrow) is not None, "the connections are used up")
        reply = refusal(narrow)
        assert reply is not None
        assert json.loads(reply.body)["code"] == "overloaded"
        assert reply.headers["connection"] == "close"
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        for status in herd(narrow, 30).statuses():
            assert status == "503"
        assert not herd(narrow, 30).faults
        for connection in busy:
            connection.send(call[-5:])
        assert {connection.reply().status for connection in busy} <= {200, 503}  # more than the bound of rows
        # They rest now, and for a second they may stay.
        wait_until(lambda: refusal(narrow) is None, "one that rests makes room")
    assert_as_before(narrow, files)


def refusal(gateway: Gateway) -> Reply | None:
    """Call once; returns the answer unless it was 200."""
    with connect(gateway.port) as connection:
        connection.send(request("one more"))
        reply = connection.reply()
    return None if reply.status == 200 else reply


def test_a_process_with_a_low_hard_limit_of_files_says_so_and_serves_what_it_can(
    gateway_factory: GatewayFactory, triton: Triton
) -> None:
    gateway = gateway_factory(triton.grpc_address, triton.repository)
    gateway.command = ["/bin/sh", "-c", f'ulimit -n {FEW_FILES}; exec "$@"', "sh", *gateway.command]
    gateway.start()
    lines = [json.loads(line) for line in gateway.log().splitlines() if "hard limit of open files" in line]
    assert [line["hard_limit"] for line in lines] == [FEW_FILES]
    bound = lines[0]["max_connections"]

    async def crowded() -> Herd:
        address = ("127.0.0.1", gateway.port)
        async with Crowd(address) as crowd:
            await crowd.grow(FEW_FILES, TIMEOUT_S)
            return await call_at_once(address, [request(text_of(caller)) for caller in range(20)], TIMEOUT_S)

    assert 0 < bound < FEW_FILES
    assert not asyncio.run(crowded()).faults
    wait_until(lambda: refusal(gateway) is None, "calls are answered")
    assert "Traceback" not in gateway.log()
