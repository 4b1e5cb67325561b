"""The load generators: what they count, and that a stalled server shows in the latencies."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from benchmarks.callers import Expected, HttpConnection, get, http_calls, post
from benchmarks.jobs import Closed, Predict, Probe, precise_run, run_closed, run_probe
from benchmarks.load import LoadResult, closed_loop, open_loop, poisson, steady

Answer = Callable[[str, bytes], Awaitable[tuple[int, object]]]
GOOD = Expected(positive=True, score=0.9)


async def always_positive(_path: str, _body: bytes) -> tuple[int, object]:
    return 200, {"sentiment": "positive", "score": 0.9}


@asynccontextmanager
async def a_server(answer: Answer, requests_per_connection: int = 1_000_000) -> AsyncIterator[tuple[str, int]]:
    """A tiny HTTP/1.1 server that keeps connections alive."""

    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for _ in range(requests_per_connection):
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].partition(b":")[2])) if lengths else b""
                status, content = await answer(head.split(b" ")[1].decode(), body)
                payload = json.dumps(content).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(payload)}\r\n\r\n".encode())
                # In two pieces, as a network may deliver it.
                await writer.drain()
                writer.write(payload)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield host, port
    finally:
        server.close()
        async with asyncio.timeout(10):
            for writer in writers:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def test_a_closed_loop_keeps_every_caller_busy_and_counts_right_answers() -> None:
    async def slow(path: str, body: bytes) -> tuple[int, object]:
        await asyncio.sleep(0.02)
        return await always_positive(path, body)

    async with a_server(slow) as address, http_calls(address, ["a", "b"], [GOOD, GOOD], 4) as calls:
        result = await closed_loop(calls, 0.1, 0.5)
    assert not result.wrong
    assert 20 <= result.calls <= 100
    assert result.per_s == pytest.approx(result.calls / 0.5)
    assert result.latencies_ms.min() >= 19


async def test_a_wrong_label_score_or_status_is_an_error_and_no_throughput() -> None:
    async def answer(_path: str, body: bytes) -> tuple[int, object]:
        text = json.loads(body)["text"] if body else ""
        if text == "refused":
            return 503, {}
        return 200, {
            "sentiment": "positive" if text != "label" else "negative",
            "score": 0.7 if text == "score" else 0.9,
        }

    texts = ["right", "label", "score", "refused"]
    async with a_server(answer) as address, http_calls(address, texts, [GOOD] * 4, 1) as calls:
        assert [await calls[0](number) for number in range(4)] == ["", "wrong label", "wrong score", "status 503"]
    result = LoadResult(1.0, np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    result.wrong["wrong label"] = 2
    assert result.per_s == 0


async def test_an_answer_that_is_wrong_after_the_window_is_an_error_and_takes_no_throughput_away() -> None:
    async def call(number: int) -> str:
        await asyncio.sleep(0.3 if number else 0.01)
        return "wrong label" if number else ""

    result = await closed_loop([call], 0.0, 0.2)
    assert result.wrong == {"wrong label": 1}
    assert result.wrong_outside == 1
    assert result.calls == 1
    assert result.per_s == pytest.approx(1 / 0.2)


def test_throughput_can_be_told_for_the_cores_that_the_generator_leaves() -> None:
    result = LoadResult(2.0, np.ones(100), np.ones(100), cpu_s=1.0)
    assert result.per_s_of_cores_left(2) == pytest.approx(50 / 1.5)


async def test_a_connection_the_server_closes_is_dialled_again() -> None:
    async with a_server(always_positive, requests_per_connection=1) as address:
        connection = HttpConnection(*address)
        statuses = []
        for _ in range(3):
            status, _body = await connection.send(get("/healthz", "x"))
            statuses.append(status)
            await closed_by_server(connection)
        await connection.close()
    assert statuses == [200, 200, 200]


async def closed_by_server(connection: HttpConnection) -> None:
    async with asyncio.timeout(5):
        while connection.connected:
            await asyncio.sleep(0.001)


async def test_a_call_that_was_given_up_leaves_no_answer_for_the_next() -> None:
    async def slow_first(path: str, _body: bytes) -> tuple[int, object]:
        await asyncio.sleep(0.2 if path == "/slow" else 0)
        return 200, path

    async with a_server(slow_first) as address:
        connection = HttpConnection(*address)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.send(get("/slow", "x"))
        _status, body = await connection.send(get("/next", "x"))
        await connection.close()
    assert json.loads(body) == "/next"


async def test_the_latency_of_an_open_loop_counts_from_the_intended_start() -> None:
    stalled = False

    async def stall_once(path: str, body: bytes) -> tuple[int, object]:
        nonlocal stalled
        if body and not stalled:
            stalled = True
            time.sleep(0.3)
        return await always_positive(path, body)

    async with a_server(stall_once) as address, http_calls(address, ["a"], [GOOD], 1) as calls:
        result = await open_loop(calls, steady(100, 0.5))
    # The server stood still for 300 ms: about 30 calls were meant to start then, and each saw a part of it.
    assert result.calls == 50
    assert (result.latencies_ms > 100).sum() >= 15
    assert result.latencies_ms.max() >= 290


async def test_an_open_loop_ends_by_itself_and_says_what_it_could_not_send() -> None:
    async def too_slow(_number: int) -> str:
        await asyncio.sleep(0.1)
        return ""

    result = await open_loop([too_slow], steady(100, 0.3), grace_s=0.1)
    assert result.not_sent > 0
    assert result.calls + result.not_sent == 30


async def test_a_gap_of_the_servers_event_loop_shows_in_the_probe() -> None:
    asked = 0

    async def healthy(_path: str, _body: bytes) -> tuple[int, object]:
        nonlocal asked
        asked += 1
        return 200, {}

    async with a_server(healthy) as address:
        probe = asyncio.create_task(asyncio.to_thread(run_probe, Probe(address, 0.005, 0.6)))
        async with asyncio.timeout(10):
            while asked < 10:
                await asyncio.sleep(0.001)
        time.sleep(0.15)
        result = await probe
    assert not result.wrong
    assert 140 <= result.latencies_ms.max() <= 1_000


async def test_jobs_run_in_another_thread_or_process_from_their_description_alone() -> None:
    async with a_server(always_positive) as address:
        job = Closed(Predict(address, ["a"], [GOOD]), callers=2, warm_s=0.05, seconds=0.2)
        result = await asyncio.to_thread(run_closed, job)
    assert result.calls > 0
    assert not result.wrong


def test_timers_of_a_precise_run_are_finer_than_a_millisecond() -> None:
    async def work() -> LoadResult:
        late = []
        for _ in range(50):
            begin_s = time.monotonic()
            await asyncio.sleep(0.0003)
            late.append(time.monotonic() - begin_s)
        return LoadResult(0.0, np.array(sorted(late)), np.array(late))

    assert precise_run(work).latencies_ms[0] < 0.001


def test_poisson_moments_repeat_for_a_seed_and_keep_their_rate() -> None:
    moments = poisson(6, 1_000, seed=1)
    assert moments == poisson(6, 1_000, seed=1)
    assert moments != poisson(6, 1_000, seed=2)
    assert moments == sorted(moments)
    assert 5_700 < len(moments) < 6_300


def test_a_request_carries_its_length() -> None:
    assert post("/predict", b"{}", "h:1").endswith(b"Content-Length: 2\r\n\r\n{}")
