"""What the stream bounds: who may open one, how many, how much is unanswered, how long anybody waits; and how it stops."""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.forms import Call
from gateway.predict import Predictor
from gateway.ratelimit import RateLimits
from gateway.stream import Session
from serving.deadline import Deadline
from tests.integration.gateway_jobs import ACME, OTHER, bearer, keys_file
from tests.integration.gateway_stream import (
    BINARY,
    PING,
    TEXT,
    Raw,
    eventually,
    frame,
    message,
    raw_stream,
    stream_door,
    until_closed,
)
from tests.parts import Triton
from tests.stubs import STUB

MB = 2**20
OPEN = "twodoor_stream_connections"


class Barrier:
    """Holds every call before the model until it is opened; ``held`` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.held, self.most, self.cancelled = asyncio.Event(), 0, 0, 0
        run = Predictor.run

        async def waiting(predictor: Predictor, call: Call, deadline: Deadline) -> Any:
            self.held += 1
            self.most = max(self.most, self.held)
            try:
                await self.opened.wait()
                return await run(predictor, call, deadline)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.held -= 1

        monkeypatch.setattr(Predictor, "run", waiting)

    async def holds(self, count: int) -> None:
        async def reached() -> bool:
            return self.held == count

        await eventually(reached, f"{count} calls are held")


@pytest.fixture
def barrier(monkeypatch: pytest.MonkeyPatch) -> Barrier:
    return Barrier(monkeypatch)


async def test_a_key_is_asked_for_at_the_handshake_and_again_with_every_message(triton: Triton, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, rate_rows_per_s=4)
    assert keys.path is not None
    async with stream_door(triton, keys, stream_origins="https://good.example") as door:
        odd = {"Authorization": "Bearer " + "a" * 65_536}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {ACME}"}, odd):
            with pytest.raises(InvalidStatus) as caught:
                await connect(door.url, additional_headers=headers)
            response = caught.value.response
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            assert json.loads(response.body or b"")["code"] == "unauthorized"
        origin: Any = "https://good.example"
        async with connect(door.url, additional_headers=bearer(ACME), origin=origin) as socket:
            for number in range(6):
                await socket.send(message(str(number), "fine", model=STUB))
            errors = [json.loads(await socket.recv()).get("error") for _ in range(6)]
            limited = [error for error in errors if error]
            assert len(limited) == 2
            assert all(error["code"] == "rate_limited" and error["retry_after_s"] > 0 for error in limited)
            lines = keys.path.read_text().splitlines()
            keys.path.write_text("\n".join(line for line in lines if '"acme"' not in line))
            keys.reload()
            await socket.send(message("late", "fine", model=STUB))
            assert await until_closed(socket) == 1008
        async with connect(door.url, additional_headers=bearer(OTHER)) as socket:
            await socket.send(message("mine", "fine", model=STUB))
            assert json.loads(await socket.recv())["id"] == "mine"


async def test_one_connection_too_many_is_told_when_to_come_back(triton: Triton) -> None:
    async with stream_door(triton, stream_max_connections=2) as door, connect(door.url):
        async with connect(door.url):
            with pytest.raises(InvalidStatus) as caught:
                await connect(door.url)
            response = caught.value.response
            assert (response.status_code, json.loads(response.body or b"")["code"]) == (503, "overloaded")
            assert int(response.headers["retry-after"]) >= 1

        async def room() -> bool:
            return await door.metric(OPEN) == 1

        await eventually(room, "the place is free")
        async with connect(door.url):
            pass


async def test_no_more_is_read_while_the_bound_is_unanswered(triton: Triton, barrier: Barrier) -> None:
    pings: dict[str, Any] = {"stream_ping_interval_s": 0.05, "stream_ping_timeout_s": 0.1}
    async with (
        stream_door(triton, stream_max_unanswered=3, **pings) as door,
        connect(door.url, compression=None, ping_interval=None) as socket,
    ):
        # 100 KB each: many of them are more than all buffers between us hold.
        texts = [message(str(number), "fine", model=STUB) + " " * 100_000 for number in range(200)]
        sending = asyncio.create_task(_send_all(socket, texts))
        await barrier.holds(3)
        # Several pings go unanswered meanwhile: the pongs lie behind what is not read, and nobody is closed for it.
        done, _ = await asyncio.wait([sending], timeout=0.4)
        assert not done
        assert barrier.most == 3
        barrier.opened.set()
        assert len({json.loads(await socket.recv())["id"] for _ in range(20)}) == 20
        assert barrier.most == 3
        sending.cancel()
        socket.transport.abort()
        await asyncio.gather(sending, return_exceptions=True)


async def _send_all(socket: Any, texts: list[str]) -> None:
    for text in texts:
        await socket.send(text)


async def test_a_caller_who_leaves_ends_the_work_for_it(triton: Triton, barrier: Barrier) -> None:
    async with stream_door(triton) as door:
        async with raw_stream(door.port) as socket:
            socket.send(*(frame(TEXT, message(str(number), "fine").encode()) for number in range(5)))
            await barrier.holds(5)
        await barrier.holds(0)
        assert barrier.cancelled == 5
        assert await door.metric('twodoor_stream_messages_total{outcome="caller_gone"}') == 5


async def test_overload_is_an_error_of_the_message_and_the_connection_goes_on(triton: Triton) -> None:
    async with stream_door(triton, max_buffered_bytes=MB) as door, connect(door.url, compression=None) as socket:
        texts = [message(str(number), "many words " * 40_000, model=STUB) for number in range(6)]
        for text in texts:
            await socket.send(text)
        codes = [json.loads(await socket.recv())["error"]["code"] for _ in texts]
        assert set(codes) <= {"text_too_long", "overloaded"}
        await socket.send(message("small", "fine", model=STUB))
        assert "output" in json.loads(await socket.recv())


async def test_nobody_waits_for_ever_for_a_peer(triton: Triton) -> None:
    impatient: dict[str, Any] = {"body_timeout_s": 0.3, "stream_idle_timeout_s": 0.6}
    async with (
        stream_door(triton, **impatient, stream_ping_interval_s=0.2, stream_ping_timeout_s=0.2) as door,
        raw_stream(door.port) as slow,
        raw_stream(door.port) as silent,
        raw_stream(door.port, buffer_bytes=4_096) as deaf,
    ):
        slow.send(frame(TEXT, b'{"id": "half"')[:10])
        drowning = asyncio.create_task(_drown(deaf))
        async with connect(door.url) as idle:
            assert await until_closed(idle) == 1000
        code, reason = await slow.close_code()
        assert (code, "not whole" in reason) == (1008, True)
        assert (await silent.close_code())[0] == 1011
        with pytest.raises(OSError, match=r"reset|lost|pipe"):
            await drowning

        async def none_open() -> bool:
            return await door.metric(OPEN) == 0

        await eventually(none_open, "all connections are gone")


async def _drown(socket: Raw) -> None:
    """Send pings and take no pong until the server has had enough."""
    pings = frame(PING, b"x" * 125) * 500
    while True:
        socket.send(pings)
        await socket.writer.drain()


async def test_a_stop_finishes_what_is_unanswered_and_says_that_the_server_goes(
    triton: Triton, barrier: Barrier
) -> None:
    async with stream_door(triton) as door, connect(door.url) as busy, connect(door.url) as resting:
        await busy.send(message("last", "fine", model=STUB))
        await barrier.holds(1)
        door.server.should_exit = True
        assert await until_closed(resting) == 1001
        barrier.opened.set()
        assert json.loads(await busy.recv())["id"] == "last"
        assert await until_closed(busy) == 1001


async def test_what_goes_on_past_the_grace_time_is_told_that_the_service_stops(
    triton: Triton, barrier: Barrier, caplog: pytest.LogCaptureFixture
) -> None:
    async with stream_door(triton, shutdown_timeout_s=0.4) as door, connect(door.url) as socket:
        await socket.send(message("never", "fine", model=STUB))
        await barrier.holds(1)
        door.server.should_exit = True
        answer = json.loads(await socket.recv())
        assert (answer["id"], answer["error"]["code"]) == ("never", "overloaded")
        assert await until_closed(socket) == 1001
    assert "Traceback" not in caplog.text


async def test_answers_that_end_while_the_connection_is_closed_are_nobodys_and_no_error(
    triton: Triton, barrier: Barrier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = Session._close

    async def closing(session: Session, why: Any) -> None:
        await close(session, why)
        barrier.opened.set()
        while session._answering:
            await asyncio.wait(list(session._answering))

    monkeypatch.setattr(Session, "_close", closing)
    async with stream_door(triton) as door, raw_stream(door.port) as socket:
        socket.send(*(frame(TEXT, message(str(number), "fine").encode()) for number in range(5)))
        await barrier.holds(5)
        socket.send(frame(BINARY, b"no text"))
        assert (await socket.close_code())[0] == 1003

        async def counted() -> bool:
            return await door.metric('twodoor_stream_messages_total{outcome="caller_gone"}') == 5

        await eventually(counted, "all five are counted")
    gc.collect()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_message_counts_as_held_from_its_arrival_on(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, take = asyncio.Event(), RateLimits.take

    async def waiting(limits: RateLimits, *given: Any) -> None:
        await may_go.wait()
        await take(limits, *given)

    monkeypatch.setattr(RateLimits, "take", waiting)
    async with stream_door(triton, max_buffered_bytes=MB) as door, connect(door.url, compression=None) as socket:
        for number in range(4):
            await socket.send(message(str(number), "fine", model=STUB) + " " * 600_000)
        async with asyncio.timeout(10):
            for number in range(1, 4):
                answer = json.loads(await socket.recv())
                assert (answer["id"], answer["error"]["code"]) == (str(number), "overloaded")
            may_go.set()
            answer = json.loads(await socket.recv())
        assert answer["id"] == "0"
        assert "output" in answer
