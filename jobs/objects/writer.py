"""Writing one object piece by piece: bounded memory, and no object unless it came to a clean end."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import obstore

from jobs.objects.away import away, translated

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART_BYTES = 5 * 2**20
"""One part of a multipart upload: the least that S3 takes."""
_PARTS_IN_FLIGHT = 2
_PIECE_BYTES = 256 * 2**10
_QUEUED_PIECES = 4
_ABORT_TIMEOUT_S = 10.0


class _AbortedError(Exception):
    """Ends the store's own upload: raised inside it, so that it takes back the parts it has sent."""


class _Feed:
    """What the store's upload reads from: pieces as they come, then the end or the abort."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue(_QUEUED_PIECES)
        self.aborted = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        piece = await self.pieces.get()
        if self.aborted:
            raise _AbortedError
        if not piece:
            raise StopAsyncIteration
        return piece

    def abort(self) -> None:
        self.aborted = True
        while not self.pieces.empty():
            self.pieces.get_nowait()
        self.pieces.put_nowait(b"")


class Writer:
    """``async with writer(key) as w: await w.write(data)``: the object is there after a clean end, and only then.

    Holds at most about 12 MiB: pieces not yet taken, and two parts on their way. Raises DependencyDown, from any of
    its calls, where the store fails or does not take a piece within ``timeout_s``.
    """

    def __init__(self, store: "ObjectStore", key: str, timeout_s: float) -> None:
        self._store, self._key, self._timeout_s = store, key, timeout_s
        self._feed = _Feed()
        self._held = bytearray()
        self._upload: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._upload = asyncio.create_task(self._run())
        return self

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes; waits while the store is slower than the caller."""
        self._held += data
        if len(self._held) >= _PIECE_BYTES:
            await self._send(bytes(self._held))
            self._held.clear()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._upload is None:  # a bug of ours: never entered
            raise RuntimeError("the writer was not entered")
        try:
            if error is None:
                await self._finish(self._upload)
        finally:
            await self._abort(self._upload)

    async def _run(self) -> None:
        try:
            # No deadline here, a caller may be slow: each step has its own, in _wait.
            await obstore.put_async(
                self._store,
                self._key,
                self._feed,
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=_PARTS_IN_FLIGHT,
            )
        except _AbortedError:
            return

    async def _send(self, piece: bytes) -> None:
        if self._upload is None:
            raise RuntimeError("the writer was not entered")
        put = asyncio.ensure_future(self._feed.pieces.put(piece))
        try:
            await self._wait(self._upload, [put])
        finally:
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)

    async def _wait(self, upload: asyncio.Task[None], others: Sequence[asyncio.Future[None]] = ()) -> None:
        """Wait for one of the others, or for the upload where there is none; an upload that failed raises."""
        try:
            async with translated("write", self._timeout_s):
                await asyncio.wait({upload, *others}, return_when=asyncio.FIRST_COMPLETED)
                if upload.done():
                    upload.result()
        except FileNotFoundError as exc:  # no such bucket, or the folder is gone
            raise away("write", str(exc)) from exc

    async def _finish(self, upload: asyncio.Task[None]) -> None:
        if self._held:
            await self._send(bytes(self._held))
        await self._send(b"")
        await self._wait(upload)

    async def _abort(self, upload: asyncio.Task[None]) -> None:
        """Take back what was sent, as far as the store lets us, and leave no task behind. No step after a clean end."""
        try:
            if not upload.done():
                self._feed.abort()
                await asyncio.wait({upload}, timeout=min(_ABORT_TIMEOUT_S, self._timeout_s))
        finally:
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)  # why it failed was raised where it was found
