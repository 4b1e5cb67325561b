"""The server's clocks and its bound of connections, over real sockets and a small app instead of the door's."""

import asyncio
import resource
import socket
import time
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs
from uvicorn import Server

from gateway import filelimit
from gateway.metrics import Metrics
from gateway.server import bind, server_config
from serving.settings import GatewaySettings
from tests.integration.gateway_stream import handshake
from tests.parts import free_ports

SMALL, LARGE = 60_000, 2_000_000


class App:
    """Answers ``/small`` and ``/large`` with that many bytes, once ``may_answer`` is set; ends small answers' connections."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(metrics=Metrics())
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answered = self.said = 0
        self.to_say = 2_000

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] == "websocket":
            await self._talk(receive, send)
            return
        if scope["path"] not in ("/healthz", "/readyz", "/metrics"):
            await self.may_answer.wait()
        size = {"/small": SMALL, "/large": LARGE}.get(scope["path"], 2)
        headers = [(b"content-length", b"%d" % size)]
        if scope["path"] == "/small":
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * size})
        self.answered += 1

    async def _talk(self, receive: Receive, send: Send) -> None:
        """Say so much on a WebSocket, then listen until the peer has gone."""
        await receive()
        await send({"type": "websocket.accept"})
        with suppress(OSError):
            while self.said < self.to_say:
                await send({"type": "websocket.send", "text": "x" * 1_000})
                self.said += 1
        while (await receive())["type"] != "websocket.disconnect":
            pass


async def _lifespan(receive: Receive, send: Send) -> None:
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


class House:
    """A running server."""

    def __init__(self, server: Server, app: App, port: int) -> None:
        self._server, self.app, self.port = server, app, port

    @property
    def open(self) -> int:
        """How many connections the server holds."""
        return len(self._server.server_state.connections)

    async def until_open(self, count: int, within_s: float = 5.0) -> None:
        """Wait until the server holds so many connections."""
        await until(lambda: self.open == count, within_s, f"{self.open} connections instead of {count}")


async def until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.01)


@asynccontextmanager
async def house(**changes: Any) -> AsyncIterator[House]:
    settings = GatewaySettings(**{"port": free_ports(1)[0], "shutdown_timeout_s": 1, **changes})
    app = App()
    server = Server(server_config(app, settings))
    listening = bind(settings)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    serving = asyncio.create_task(server.serve([listening]))
    try:
        await until(lambda: server.started, 5, "started")
        yield House(server, app, settings.port)
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def caller(where: House, *, small_window: bool = False) -> AsyncIterator[tuple[Reader, Writer]]:
    sock = socket.socket()
    if small_window:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", where.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4_096)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def head_of(reader: Reader) -> bytes:
    async with asyncio.timeout(5):
        return await reader.readuntil(b"\r\n\r\n")


async def ends(reader: Reader) -> bool:
    """Return whether the server has closed the connection, after what it has sent."""
    try:
        async with asyncio.timeout(5):
            while await reader.read(65_536):
                pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


async def test_a_peer_that_takes_nothing_of_its_last_answer_is_let_go() -> None:
    async with house(body_timeout_s=0.3) as where, caller(where, small_window=True) as (_, writer):
        writer.write(get("/small"))
        await where.until_open(1)
        await where.until_open(0)


async def test_a_stream_behind_an_answer_that_nobody_takes_is_let_go_and_nothing_is_written_to_it() -> None:
    async with house(body_timeout_s=0.3) as where, caller(where, small_window=True) as (_, writer):
        writer.write(get("/large"))
        await where.until_open(1)
        await until(lambda: where.app.answered == 1, 5, "the answer is written")
        writer.write(handshake())
        await where.until_open(0)
        assert where.app.said == 0


async def test_a_stream_whose_peer_ends_and_takes_nothing_is_let_go() -> None:
    async with house(body_timeout_s=0.3) as where, caller(where, small_window=True) as (_, writer):
        where.app.to_say = 50  # more than the kernel keeps here, less than makes the server wait
        writer.write(handshake())
        await until(lambda: where.app.said == 50, 5, "all is said")
        writer.write_eof()
        await where.until_open(0)


async def test_a_peer_that_takes_a_few_bytes_at_a_time_is_let_go() -> None:
    async with (
        house(body_timeout_s=0.3, min_transfer_bytes_per_s=100_000) as where,
        caller(where, small_window=True) as (reader, writer),
    ):
        writer.write(get("/large"))
        await head_of(reader)
        end_s = time.monotonic() + 5
        while where.open:
            assert time.monotonic() < end_s, "a peer at a byte a moment keeps its place"
            await reader.read(1)
            await asyncio.sleep(0.02)


async def test_a_peer_that_takes_its_time_and_keeps_the_pace_gets_all() -> None:
    async with house(body_timeout_s=0.3, min_transfer_bytes_per_s=10_000) as where, caller(where) as (reader, writer):
        writer.write(get("/large"))
        await head_of(reader)
        left = LARGE
        while left:
            left -= len(await reader.readexactly(min(left, 20_000)))
            await asyncio.sleep(0.01)


async def test_a_head_that_drips_is_closed_at_its_time_however_often_a_byte_comes() -> None:
    async with house(head_timeout_s=0.4) as where, caller(where) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        dripping = asyncio.create_task(_drip(writer))
        started_s = time.monotonic()
        assert await ends(reader)
        assert time.monotonic() - started_s < 3
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


async def _drip(writer: Writer) -> None:
    while True:
        writer.write(b"a")
        await asyncio.sleep(0.05)


async def busy_callers(where: House, count: int, run: Callable[[list[tuple[Reader, Writer]]], Awaitable[None]]) -> None:
    """Open connections whose requests are not answered yet, then run."""
    where.app.may_answer.clear()
    peers = [caller(where) for _ in range(count)]
    opened = [await peer.__aenter__() for peer in peers]
    try:
        for _, writer in opened:
            writer.write(get("/"))
        await where.until_open(count)
        await run(opened)
    finally:
        for peer in peers:
            await peer.__aexit__(None, None, None)


async def test_a_connection_over_the_bound_gets_503_and_its_time_and_the_others_their_answers() -> None:
    async with house(max_connections=4) as where:

        async def run(busy: list[tuple[Reader, Writer]]) -> None:
            for _ in range(3):
                async with caller(where) as (reader, writer):
                    writer.write(get("/"))
                    head = await head_of(reader)
                    assert head.startswith(b"HTTP/1.1 503 ")
                    assert b"\r\nretry-after: " in head.lower()
                    assert b"application/problem+json" in head
                    assert head.lower().count(b"connection: close") == 1
                    assert await ends(reader)
            where.app.may_answer.set()
            for reader, _ in busy:
                assert (await head_of(reader)).startswith(b"HTTP/1.1 200 ")

        await busy_callers(where, 4, run)


async def test_a_connection_that_rests_makes_room_the_one_that_rests_longest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.connections._RESTED_S", 0.0)
    async with (
        house(max_connections=2) as where,
        caller(where) as (first, first_writer),
        caller(where) as (second, other),
    ):
        for reader, writer in ((second, other), (first, first_writer)):  # the second rests longer
            writer.write(get("/"))
            await head_of(reader)
            await reader.readexactly(2)
        async with caller(where) as (reader, writer):
            writer.write(get("/"))
            assert (await head_of(reader)).startswith(b"HTTP/1.1 200 ")
        assert await ends(second)
        first_writer.write(get("/"))
        assert (await head_of(first)).startswith(b"HTTP/1.1 200 ")


async def test_where_there_is_no_room_even_to_refuse_the_refusal_comes_at_once() -> None:
    async with house(max_connections=1) as where:

        async def run(_: list[tuple[Reader, Writer]]) -> None:
            async with caller(where), caller(where) as (reader, _writer):
                assert (await head_of(reader)).startswith(b"HTTP/1.1 503 ")
                assert await ends(reader)

        await busy_callers(where, 1, run)


async def test_who_is_over_the_bound_and_says_nothing_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.limited_http._TURNED_AWAY_HEAD_S", 0.1)
    async with house(max_connections=1) as where:

        async def run(_: list[tuple[Reader, Writer]]) -> None:
            async with caller(where) as (reader, _writer):
                assert b"\r\nretry-after: " in await head_of(reader)
                assert await ends(reader)

        await busy_callers(where, 1, run)


@pytest.mark.parametrize(
    ("soft", "hard", "room", "warned"),
    [
        (1_024, 1_000_000, 10_000, False),
        (1_024, resource.RLIM_INFINITY, 10_000, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10_000, False),
        (1_024, 4_096, 3_072, True),
        (256, 256, 1, True),
    ],
)
def test_the_soft_limit_of_files_is_raised_and_a_low_hard_one_is_told(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, room: int, warned: bool
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    with capture_logs() as logs:
        assert filelimit.make_room(10_000) == room
    assert bool(logs) is warned
    assert all(new[1] == hard for new in limits)
    if hard == 4_096:
        assert limits[-1][0] == 4_096


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_a_full_house_still_answers_the_operator(path: str) -> None:
    async with house(max_connections=4) as where:

        async def run(_: list[tuple[Reader, Writer]]) -> None:
            async with caller(where) as (reader, writer):
                writer.write(get(path))
                head = await head_of(reader)
                assert head.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" in head.lower()
                assert await ends(reader)

        await busy_callers(where, 4, run)
