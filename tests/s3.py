"""A real S3-compatible server as a child process, and a proxy that can be made to fail, for tests and chaos."""

import asyncio
import http.client
import os
import socket
import struct
import subprocess
import sys
import threading
from typing import Self

from tests.parts import free_ports, wait_until

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
"""What a process needs in its environment; the server takes any keys."""
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_BLOCK_BYTES = 65_536
_SLOW_BYTES = 1_024
_SLOW_PAUSE_S = 0.1


class S3Server:
    """moto's server on a loopback port; it keeps everything in its memory."""

    def __init__(self) -> None:
        self.port = free_ports(1)[0]
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The value for TWODOOR_JOBS_OBJECTS_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start the server and wait until it answers."""
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._child = subprocess.Popen(
            command, env={**os.environ, **KEYS}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        wait_until(self._answers, "the S3-compatible server answers", timeout_s=60)
        return self

    def stop(self) -> None:
        """End the server; what it held is gone."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(10)

    def create_bucket(self, name: str) -> None:
        """Create a bucket (3 to 63 characters)."""
        if (answer := self.request("PUT", f"/{name}"))[0] != 200:
            raise AssertionError(f"bucket {name}: {answer}")

    def request(self, method: str, target: str) -> tuple[int, bytes]:
        """Send one request past obstore: buckets, and what only S3 itself shows (``/bucket?uploads``)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, target)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _answers(self) -> bool:
        if self._child is not None and self._child.poll() is not None:
            raise AssertionError(f"the S3-compatible server ended with {self._child.returncode}")
        try:
            return self.request("GET", "/")[0] == 200
        except OSError:
            return False


class FaultProxy:
    """Forwards TCP to ``target_port`` on loopback, until it is told to fail.

    ``error`` answers each request with 503, ``reset`` resets connections, ``hang`` takes requests and never answers,
    ``slow`` lets about 10 KB/s through. A fault also hits the connections that are open; ``hits`` counts the
    requests or connections that met one.
    """

    KINDS = ("error", "reset", "hang", "slow")

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.hits = 0
        self._target_port = target_port
        self._kind: str | None = None
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        """The value for TWODOOR_JOBS_OBJECTS_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Listen on a free port."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def stop(self) -> None:
        """Close everything."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def fault(self, kind: str) -> None:
        """Fail from now on, until ``heal``."""
        if kind not in self.KINDS:
            raise ValueError(f"no fault {kind!r}: {', '.join(self.KINDS)}")
        self._kind = kind

    def heal(self) -> None:
        """Forward again; connections that hang are closed."""
        self._kind = None

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("a connection is handled in a task")
        self._links.add(task)
        try:
            await self._link(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either end went away, or the proxy is closed: this task has nothing above it
        finally:
            self._links.discard(task)
            writer.close()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        ways = [
            asyncio.ensure_future(self._forward(reader, far_writer, writer)),
            asyncio.ensure_future(self._forward(far_reader, writer, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.close()

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, caller: asyncio.StreamWriter
    ) -> None:
        while data := await source.read(_BLOCK_BYTES):
            kind = self._kind
            if kind is not None:
                self.hits += 1
            if kind == "error":
                caller.write(_UNAVAILABLE)
                await caller.drain()
                return
            if kind == "reset":
                _reset_at_close(caller)
                return
            if kind == "hang":
                while self._kind == "hang":
                    await asyncio.sleep(0.05)
                return
            await self._send(data, sink)

    async def _send(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        for first in range(0, len(data), _SLOW_BYTES):
            if self._kind != "slow":
                sink.write(data[first:])
                break
            await asyncio.sleep(_SLOW_PAUSE_S)
            sink.write(data[first : first + _SLOW_BYTES])
        await sink.drain()


def _reset_at_close(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if isinstance(connection, socket.socket) or hasattr(connection, "setsockopt"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
