"""A gateway in the test's own loop, with its real server and a real Triton, and WebSockets by hand and by a library."""

import asyncio
import base64
import json
import os
import re
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from uvicorn import Server
from websockets.exceptions import ConnectionClosed

from gateway.app import build
from gateway.keys import Keys
from gateway.server import bind, server_config
from serving.settings import GatewaySettings, ModelSettings, TritonSettings
from tests.parts import Triton, free_ports

CONTINUED, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n{more}\r\n"
)


def handshake(*headers: str, path: str = "/v1/stream") -> bytes:
    """Return the bytes of an opening handshake."""
    key = base64.b64encode(os.urandom(16)).decode()
    more = "".join(f"{line}\r\n" for line in headers)
    return HANDSHAKE.format(path=path, key=key, more=more).encode()


def frame(opcode: int, payload: bytes, *, fin: bool = True, masked: bool = True, reserved: int = 0) -> bytes:
    """Return one frame of a client; the mask is of zeros, so the payload stays as it is."""
    head = bytes([(0x80 if fin else 0) | reserved | opcode])
    bit, size = 0x80 if masked else 0, len(payload)
    if size < 126:
        head += bytes([bit | size])
    elif size < 65_536:
        head += bytes([bit | 126]) + struct.pack("!H", size)
    else:
        head += bytes([bit | 127]) + struct.pack("!Q", size)
    return head + (bytes(4) if masked else b"") + payload


def message(id: str, text: str, **more: Any) -> str:  # noqa: A002 - as on the wire
    """Return a message of the stream."""
    return json.dumps({"id": id, "text": text, **more})


@dataclass
class Raw:
    """A WebSocket by hand: answers no ping, closes nothing, sends whatever it is told."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes

    def send(self, *frames: bytes) -> None:
        """Send frames as they are."""
        self.writer.write(b"".join(frames))

    async def receive(self, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Return opcode and payload of the next frame; raises IncompleteReadError at the end."""
        async with asyncio.timeout(timeout_s):
            first, size = await self.reader.readexactly(2)
            if size == 126:
                size = struct.unpack("!H", await self.reader.readexactly(2))[0]
            return first & 15, await self.reader.readexactly(size)

    async def close_code(self, timeout_s: float = 10.0) -> tuple[int, str]:
        """Drop what comes until the close frame, and return its code and reason."""
        while True:
            opcode, payload = await self.receive(timeout_s)
            if opcode == CLOSE:
                return struct.unpack("!H", payload[:2])[0], payload[2:].decode()


@asynccontextmanager
async def raw_stream(port: int, *headers: str, buffer_bytes: int | None = None) -> AsyncIterator[Raw]:
    """Open one, and in the end cut it off; ``buffer_bytes`` is what the kernel may keep for a reader who does not read."""
    sock = socket.socket()
    sock.setblocking(False)
    if buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        writer.write(handshake(*headers))
        yield Raw(reader, writer, await reader.readuntil(b"\r\n\r\n"))
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


@dataclass
class Door:
    """A running gateway."""

    port: int
    http: httpx.AsyncClient
    server: Server

    @property
    def url(self) -> str:
        """Where the stream is."""
        return f"ws://127.0.0.1:{self.port}/v1/stream"

    async def metric(self, name: str) -> float:
        """Return a value of /metrics, 0 where there is none."""
        return metric((await self.http.get("/metrics")).text, name)


def metric(page: str, name: str) -> float:
    """Return the value of one series of a metrics page, 0 where there is none."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


@asynccontextmanager
async def stream_door(triton: Triton, keys: Keys | None = None, **changes: Any) -> AsyncIterator[Door]:
    """A gateway in this loop, ready."""
    given: dict[str, Any] = {"port": free_ports(1)[0], **changes}
    gateway = GatewaySettings(**given)
    models: dict[str, Any] = {"repository": triton.repository}
    address: dict[str, Any] = {"grpc_address": triton.grpc_address, "poll_interval_s": 0.2}
    app = build(gateway, ModelSettings(**models), TritonSettings(**address), _fatal, keys=keys)
    server = Server(server_config(app, gateway))
    serving = asyncio.create_task(server.serve([bind(gateway)]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=20) as client:
            await eventually(lambda: _ready(client), "the door is ready")
            yield Door(gateway.port, client, server)
    finally:
        server.should_exit = True
        await serving


async def eventually(condition: Any, what: str, timeout_s: float = 20.0) -> None:
    """Await a condition until it holds; fails with ``what`` where it does not in time."""
    end_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.01)


async def until_closed(connection: Any) -> int:
    """Return the code with which the server closes a library's WebSocket."""
    with suppress(ConnectionClosed):
        async with asyncio.timeout(10):
            while True:
                await connection.recv()
    return int(connection.close_code)


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return bool((await client.get("/readyz")).json()["dependencies"]["triton"] == "up")
    except httpx.TransportError:
        return False


def _fatal(error: BaseException) -> None:
    raise error
