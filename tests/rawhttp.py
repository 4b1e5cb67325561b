"""HTTP by hand, for what no client library would send."""

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    """One response; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """One TCP connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = b""

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.sock.sendall(data)

    def send_all(self, chunks: Iterable[bytes]) -> bool:
        """Send until the server closes; returns whether everything went out."""
        try:
            for chunk in chunks:
                self.sock.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def reply(self) -> Reply:
        """Read one response with a Content-Length."""
        while b"\r\n\r\n" not in self._pending:
            self._more()
        head, _, rest = self._pending.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", 0))
        self._pending = rest
        while len(self._pending) < length:
            self._more()
        body, self._pending = self._pending[:length], self._pending[length:]
        return Reply(int(lines[0].split()[1]), headers, body)

    def closed_within(self, seconds: float) -> bool:
        """Return whether the server closes the connection in this time; what it still sends is dropped."""
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                self.sock.settimeout(left)
                if not self.sock.recv(65536):
                    return True
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True
        return False

    def _more(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise AssertionError(f"connection closed after {self._pending!r}")
        self._pending += data


@contextmanager
def connect(port: int, timeout_s: float = 20.0) -> Iterator[Connection]:
    """Open a connection to a port on loopback."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as sock:
        yield Connection(sock)


def post(path: str, body: bytes, *headers: str, content_type: str = "application/json") -> bytes:
    """Return the bytes of a POST with a Content-Length."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n" + body


def chunked(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield chunks in the chunked transfer coding, with its end."""
    for chunk in chunks:
        yield b"%x\r\n" % len(chunk) + chunk + b"\r\n"
    yield b"0\r\n\r\n"
