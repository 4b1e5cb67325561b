"""The bodies of jobs: streamed piece by piece, bounded in number, in decoded bytes, in pauses and in pace, not in time as a whole."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.types import Receive, Scope

from gateway.body import Gzip, declared_bytes, is_gzip, too_large
from gateway.metrics import Metrics
from gateway.problems import Problem
from serving.errors import Overloaded
from serving.settings import GatewaySettings

# What a gzip body may become in one piece: memory does not follow what a caller packs.
_PIECE_BYTES = 256 * 2**10
_RETRY_S = 5.0


class Uploads:
    """The places of bodies that are received at one time, and how one is read."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._taken = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the places; raises Overloaded where all are taken."""
        if self._taken >= self._settings.max_uploads:
            self._metrics.shed.labels("uploads").inc()
            raise Overloaded("the service receives as many jobs as it may", _RETRY_S)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    def body(self, scope: Scope, receive: Receive) -> AsyncGenerator[bytes, None]:
        """Return the decoded body in pieces; raises Problem for what its head already shows to be wrong (413, 415).

        The pieces raise Problem: 408 after a pause or when it comes too slowly, 413 over the limit, 400 where the body is cut or not its gzip.
        """
        gzip = Gzip() if is_gzip(scope) else None
        if declared_bytes(scope) > self._settings.max_job_body_bytes:
            raise too_large(self._settings.max_job_body_bytes)
        return self._pieces(receive, gzip)

    async def _pieces(self, receive: Receive, gzip: Gzip | None) -> AsyncGenerator[bytes, None]:
        most, sent_bytes, made_bytes, more = self._settings.max_job_body_bytes, 0, 0, True
        waited_s = 0.0
        while more:
            asked_s = time.monotonic()
            chunk, more = await self._next(receive, sent_bytes, waited_s)
            waited_s += time.monotonic() - asked_s
            sent_bytes += len(chunk)
            if sent_bytes > most:  # gzip may be long and hold nothing
                raise too_large(most)
            async for piece in _decoded(chunk, gzip):
                made_bytes += len(piece)
                if made_bytes > most:
                    raise too_large(most)
                yield piece
        if gzip is not None:
            gzip.finish()

    async def _next(self, receive: Receive, sent_bytes: int, waited_s: float) -> tuple[bytes, bool]:
        """Return the next piece. What was sent buys time for it, however it was spread; our own work costs nothing."""
        pause_s, least = self._settings.upload_idle_timeout_s, self._settings.min_transfer_bytes_per_s
        left_s = pause_s + sent_bytes / least - waited_s
        try:
            async with asyncio.timeout(min(pause_s, left_s)):
                message = await receive()
        except TimeoutError:
            if left_s < pause_s:
                detail = f"the body comes slower than {least} bytes a second"
                raise Problem(408, "body_timeout", detail, limit=least) from None
            detail = f"nothing of the body came for {pause_s:g} s"
            raise Problem(408, "body_timeout", detail, limit=pause_s) from None
        if message["type"] == "http.disconnect":
            raise Problem(400, "invalid_body", "the body ended before its end", field="body")
        return message.get("body", b""), message.get("more_body", False)


async def _decoded(chunk: bytes, gzip: Gzip | None) -> AsyncIterator[bytes]:
    if gzip is None:
        if chunk:
            yield chunk
        return
    async for piece in gzip.pieces(chunk, _PIECE_BYTES):
        yield piece
