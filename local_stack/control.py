"""The supervisor's control socket: one JSON line in, one out. Lets another process stop, start and restart a service."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from local_stack.state import short_path_to
from serving.errors import ConfigError

MAX_LINE_BYTES = 4096
READ_TIMEOUT_S = 5.0

Handler = Callable[[str, str], Awaitable[str | None]]


@asynccontextmanager
async def serve(path: Path, handler: Handler) -> AsyncIterator[None]:
    """Listen while the context is open. ``handler(operation, service)`` returns an error sentence or None."""
    listener = _listen(path)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                line = await reader.readline()
            request = json.loads(line)
            error = await handler(str(request["operation"]), str(request["service"]))
            writer.write(json.dumps({"error": error}).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ValueError, KeyError, TypeError, ConnectionError):
            pass  # not our client, or it left: nobody waits for an answer
        finally:
            writer.close()

    server = await asyncio.start_unix_server(connection, sock=listener, limit=MAX_LINE_BYTES)
    try:
        async with server:
            yield
    finally:
        await asyncio.to_thread(path.unlink, missing_ok=True)


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    folder, short = short_path_to(path)
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(short)
    finally:
        os.close(folder)
    return listener


def send(path: Path, operation: str, service: str, timeout_s: float) -> None:
    """Ask the supervisor to ``stop``, ``start`` or ``restart`` a service; raises ConfigError with its refusal."""
    if not path.exists():
        raise ConfigError("the stack is not running")
    folder, short = short_path_to(path)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            try:
                connection.connect(short)
            except (ConnectionRefusedError, FileNotFoundError):
                raise ConfigError("the stack is not running") from None
            connection.sendall(json.dumps({"operation": operation, "service": service}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                line = answer.readline()
    finally:
        os.close(folder)
    if not line:
        raise ConfigError("the supervisor ended before it answered")
    if error := json.loads(line)["error"]:
        raise ConfigError(error)
