"""Request bodies, limited while they are read: decoded bytes, with and without a length, plain and gzip."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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
    async def read(self, scope: Scope, receive: Receive, deadline: Deadline) -> AsyncIterator[bytearray]:
        """Yield the decoded body; its bytes count as held until the block ends.

        Raises Problem (408, 413, 415, 400), Overloaded, DeadlineExceeded or CallerGone.
        """
        encoding = _content_encoding(scope)
        self._refuse_length(scope)
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            self._budget.take(count)
            held += count

        try:
            yield await self._read(receive, _Gzip(self._settings) if encoding else None, hold, deadline)
        finally:
            self._budget.give_back(held)

    async def _read(
        self, receive: Receive, gzip: "_Gzip | None", hold: Callable[[int], None], deadline: Deadline
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
                    if sent_bytes > self._settings.max_body_bytes:  # gzip may be long and hold nothing
                        raise self._too_large()
                    if gzip is not None:
                        room = self._settings.max_body_bytes - len(body)
                        chunk = await gzip.decode(chunk, room)
                    if len(body) + len(chunk) > self._settings.max_body_bytes:
                        raise self._too_large()
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

    def _refuse_length(self, scope: Scope) -> None:
        length = header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > self._settings.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> Problem:
        limit = self._settings.max_body_bytes
        return Problem(413, "body_too_large", f"the body is larger than {limit} bytes", field="body", limit=limit)


class _Gzip:
    """One body's gzip decoder; never makes more than one byte over the room it is given."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._inflate = zlib.decompressobj(_GZIP)
        self._settings = settings

    async def decode(self, chunk: bytes, room_bytes: int) -> bytes:
        if len(chunk) <= _INLINE_BYTES:
            return self._decode(chunk, room_bytes)
        return await asyncio.to_thread(self._decode, chunk, room_bytes)

    def _decode(self, chunk: bytes, room_bytes: int) -> bytes:
        pieces: list[bytes] = []
        room = room_bytes + 1
        try:
            while chunk and room > 0:
                if self._inflate.eof:  # the next member of the stream
                    self._inflate = zlib.decompressobj(_GZIP)
                piece = self._inflate.decompress(chunk, room)
                pieces.append(piece)
                room -= len(piece)
                chunk = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
        except zlib.error:
            raise _broken_gzip() from None
        return b"".join(pieces)

    def finish(self) -> None:
        """Raise Problem unless the stream came to its end."""
        if not self._inflate.eof:
            raise _broken_gzip()


def has_body(scope: Scope) -> bool:
    """Return whether the request says that a body comes with it."""
    return exchange_of(scope).body_pending


def check_json_type(scope: Scope) -> None:
    """Raise Problem 415 unless the body is declared as JSON in UTF-8."""
    value = (header(scope, b"content-type") or b"").decode("latin-1")
    kind, _, rest = value.partition(";")
    parameters = {part.strip().lower().replace('"', "") for part in rest.split(";") if part.strip()}
    if kind.strip().lower() != "application/json" or parameters - {"charset=utf-8", "charset=utf8"}:
        raise Problem(
            415,
            "unsupported_media_type",
            "send Content-Type: application/json (UTF-8), or the text as ?text=",
            field="header Content-Type",
            headers={"Accept": "application/json"},
        )


def _content_encoding(scope: Scope) -> bool:
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


def _broken_gzip() -> Problem:
    return Problem(400, "invalid_body", "the body is not gzip, as its Content-Encoding says", field="body")
