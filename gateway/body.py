"""Request bodies, limited while they are read: decoded bytes, with and without a length, plain and gzip."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import Receive, Scope

from gateway.admission import ByteBudget
from gateway.envelope import exchange_of, header
from gateway.problems import CallerGone, Problem
from serving.deadline import Deadline
from serving.errors import DeadlineExceeded
from serving.settings import GatewaySettings

_GZIP = 31  # zlib's name for "a gzip header and trailer"
# Below this a chunk is decoded at once: it cannot hold the loop for long, whatever it expands to within the limit.
_INLINE_BYTES = 512


class BodyReader:
    """Reads bodies within the limits of the settings and of what all calls together may hold."""

    def __init__(self, settings: GatewaySettings, budget: ByteBudget) -> None:
        self._settings, self._budget = settings, budget

    @asynccontextmanager
    async def read(
        self, scope: Scope, receive: Receive, deadline: Deadline, max_bytes: int | None = None
    ) -> AsyncIterator[bytearray]:
        """Yield the decoded body; its bytes count as held until the block ends. ``max_bytes`` None: the settings' limit.

        Raises Problem (408, 413, 415, 400), Overloaded, DeadlineExceeded or CallerGone.
        """
        encoding = is_gzip(scope)
        most = self._settings.max_body_bytes if max_bytes is None else max_bytes
        if declared_bytes(scope) > most:
            raise too_large(most)
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            self._budget.take(count)
            held += count

        try:
            yield await self._read(receive, Gzip() if encoding else None, hold, deadline, most)
        finally:
            self._budget.give_back(held)

    @contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Count what came in another way than as a body until the block ends; raises Overloaded."""
        self._budget.take(size_bytes)
        try:
            yield
        finally:
            self._budget.give_back(size_bytes)

    async def _read(
        self, receive: Receive, gzip: "Gzip | None", hold: Callable[[int], None], deadline: Deadline, most: int
    ) -> bytearray:
        body = bytearray()
        sent_bytes = 0
        left_s, seconds = deadline.remaining_s(), self._settings.body_timeout_s
        try:
            async with asyncio.timeout(min(left_s, seconds)):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise CallerGone
                    more = message.get("more_body", False)
                    chunk = message.get("body", b"")
                    sent_bytes += len(chunk)
                    if sent_bytes > most:  # gzip may be long and hold nothing
                        raise too_large(most)
                    if gzip is not None:
                        chunk = await gzip.decode(chunk, most - len(body))
                    if len(body) + len(chunk) > most:
                        raise too_large(most)
                    hold(len(chunk))
                    body += chunk
        except TimeoutError:
            # Asked of the bounds, not of the clock: a timer may fire a moment before its time.
            if left_s <= seconds:
                raise DeadlineExceeded("the deadline passed while the body was read") from None
            raise Problem(408, "body_timeout", f"the body did not arrive within {seconds:g} s", limit=seconds) from None
        if gzip is not None:
            gzip.finish()
        return body


class Gzip:
    """One body's gzip decoder; never makes more at once than it is asked for."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_GZIP)

    async def decode(self, chunk: bytes, room_bytes: int) -> bytes:
        """Return what a chunk decodes to, cut one byte after the room."""
        if len(chunk) <= _INLINE_BYTES:
            return self._decode(chunk, room_bytes)
        return await asyncio.to_thread(self._decode, chunk, room_bytes)

    async def pieces(self, chunk: bytes, most_bytes: int) -> AsyncIterator[bytes]:
        """Yield what a chunk decodes to, at most so many bytes at a time, however much it becomes."""
        more = bool(chunk)
        while more:
            piece, chunk, more = await asyncio.to_thread(self._fill, chunk, most_bytes)
            if piece:
                yield piece

    def _decode(self, chunk: bytes, room_bytes: int) -> bytes:
        return self._fill(chunk, room_bytes + 1)[0] if chunk else b""

    def _fill(self, chunk: bytes, most_bytes: int) -> tuple[bytes, bytes, bool]:
        """Return as much output as there may be, the input that is left, and whether there may be more output."""
        pieces: list[bytes] = []
        room, more = most_bytes, True
        while more and room > 0:
            piece, chunk, more = self._step(chunk, room)
            pieces.append(piece)
            room -= len(piece)
        return b"".join(pieces), chunk, more

    def _step(self, chunk: bytes, most_bytes: int) -> tuple[bytes, bytes, bool]:
        """The same of one member of the stream, and one call of zlib."""
        if self._inflate.eof:  # the next member of the stream
            self._inflate = zlib.decompressobj(_GZIP)
        try:
            piece = self._inflate.decompress(chunk, most_bytes)
        except zlib.error:
            raise _broken_gzip() from None
        if self._inflate.eof:
            rest = self._inflate.unused_data
            return piece, rest, bool(rest)
        rest = self._inflate.unconsumed_tail
        return piece, rest, bool(rest) or len(piece) == most_bytes

    def finish(self) -> None:
        """Raise Problem unless the stream came to its end."""
        if not self._inflate.eof:
            raise _broken_gzip()


def has_body(scope: Scope) -> bool:
    """Return whether the request says that a body comes with it."""
    return exchange_of(scope).body_pending


def declared_bytes(scope: Scope) -> int:
    """Return what Content-Length says, 0 where it says nothing."""
    length = header(scope, b"content-length")
    return int(length[:20]) if length is not None and length.isdigit() else 0


def check_json_type(scope: Scope) -> None:
    """Raise Problem 415 unless the body is declared as JSON in UTF-8."""
    if content_type(scope) != "application/json":
        raise wrong_type("send Content-Type: application/json (UTF-8), or the text as ?text=", "application/json")


def content_type(scope: Scope) -> str:
    """Return the body's media type in lower case; empty where none is given or its charset is not UTF-8."""
    value = (header(scope, b"content-type") or b"").decode("latin-1")
    kind, _, rest = value.partition(";")
    parameters = {part.strip().lower().replace('"', "") for part in rest.split(";") if part.strip()}
    return "" if parameters - {"charset=utf-8", "charset=utf8"} else kind.strip().lower()


def wrong_type(detail: str, accepted: str) -> Problem:
    """Return the problem of a body of another type."""
    return Problem(415, "unsupported_media_type", detail, field="header Content-Type", headers={"Accept": accepted})


def is_gzip(scope: Scope) -> bool:
    """Return whether the body is gzip; raises Problem 415 for anything else, also for gzip twice."""
    value = (header(scope, b"content-encoding") or b"identity").strip().lower()
    if value in (b"identity", b""):
        return False
    if value in (b"gzip", b"x-gzip"):
        return True
    raise Problem(
        415,
        "unsupported_encoding",
        "send the body as it is, or with Content-Encoding: gzip (once)",
        field="header Content-Encoding",
        headers={"Accept-Encoding": "gzip"},
    )


def too_large(limit_bytes: int) -> Problem:
    """Return the problem of a body over a limit."""
    detail = f"the body is larger than {limit_bytes} bytes"
    return Problem(413, "body_too_large", detail, field="body", limit=limit_bytes)


def _broken_gzip() -> Problem:
    return Problem(400, "invalid_body", "the body is not gzip, as its Content-Encoding says", field="body")
