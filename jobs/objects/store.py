"""Objects under keys: what Twodoor needs of an object store, over obstore."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import obstore

from jobs.objects.away import ObjectMissing, away, translated
from jobs.objects.writer import PART_BYTES, Writer
from serving.errors import DependencyDown

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PIECE_BYTES = 2**20
"""Most bytes read at once by a stream."""
AHEAD = 6
"""Most pieces a stream reads ahead of whoever takes them."""
_DELETE_KEYS = 500
_OWN_KEY = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as a list shows it."""

    key: str
    size_bytes: int
    modified_at: datetime


class Objects:
    """One object store. Every call ends within about ``timeout_s`` (of each part, for long ones).

    All raise DependencyDown where the store does not answer, refuses, or has no room; reads also ObjectMissing.
    """

    def __init__(self, store: "ObjectStore", timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s

    async def put(self, key: str, data: bytes) -> None:
        """Store an object: readers see all of it or nothing."""
        _check_own(key)
        try:
            async with translated("put", self._timeout_s):
                await obstore.put_async(self._store, key, data, chunk_size=PART_BYTES, max_concurrency=2)
        except FileNotFoundError as exc:  # no such bucket
            raise away("put", str(exc)) from exc

    def writer(self, key: str) -> Writer:
        """Return a context that writes an object piece by piece; only a clean end makes the object."""
        _check_own(key)
        return Writer(self._store, key, self._timeout_s)

    async def get(self, key: str) -> bytes:
        """Return an object's bytes; raises ObjectMissing."""
        return await self.get_range(key, 0, await self.size(key))

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return exactly the bytes ``start`` to ``end`` (exclusive); raises ObjectMissing also where there are fewer."""
        if start >= end:
            return b""
        try:
            data = await self._read(key, start, end)
        except DependencyDown as exc:
            # Stores answer a range behind the end, or a name below a file, like a failure of theirs; the size tells.
            if isinstance(exc.__cause__, TimeoutError) or await self.size(key) >= end:
                raise
            data = b""
        if len(data) != end - start:
            raise ObjectMissing(f"{key} is shorter than {end} bytes")
        return data

    async def size(self, key: str) -> int:
        """Return an object's length in bytes; raises ObjectMissing."""
        try:
            async with translated("head", self._timeout_s):
                return (await obstore.head_async(self._store, key))["size"]
        except FileNotFoundError:
            await self.ping()
            raise ObjectMissing(f"no object {key}") from None

    async def stream(self, key: str, start: int = 0, end: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield an object's bytes in order, by bounded reads: a reader may be as slow as it likes."""
        last = await self.size(key) if end is None else end
        async with aclosing(self.stream_ranges([(key, start, last)])) as pieces:
            async for piece in pieces:
                yield piece

    async def stream_ranges(self, ranges: Iterable[tuple[str, int, int]]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of (key, start, end) after (key, start, end); reads at most AHEAD pieces ahead.

        Whoever stops early closes it (``contextlib.aclosing``).
        """
        left = _pieces(ranges)
        reads: deque[asyncio.Task[bytes]] = deque()
        try:
            while True:
                while len(reads) < AHEAD and (piece := next(left, None)) is not None:
                    reads.append(asyncio.create_task(self.get_range(*piece)))
                if not reads:
                    return
                data = await reads[0]
                reads.popleft()
                yield data
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are missing are fine. Never an imported one."""
        if any(key.startswith("imports/") for key in keys):
            raise ValueError("imported objects are not ours to delete")
        for first in range(0, len(keys), _DELETE_KEYS):
            await self._delete(keys[first : first + _DELETE_KEYS])

    async def list(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        """Yield what lies under a prefix (``jobs/…/``), in no order; also what a killed writer left behind."""
        pages = obstore.list(self._store, prefix, chunk_size=1000)
        while True:
            try:
                async with translated("list", self._timeout_s):
                    page = await anext(pages, None)
            except FileNotFoundError as exc:
                raise away("list", str(exc)) from exc
            if page is None:
                return
            for meta in page:
                yield ObjectInfo(meta["path"], meta["size"], meta["last_modified"])

    async def ping(self) -> None:
        """Raise DependencyDown unless the store answers and the bucket or folder is there."""
        async with aclosing(self.list("ping/")) as found:
            await anext(found, None)

    async def _read(self, key: str, start: int, end: int) -> bytes:
        try:
            async with translated("get", self._timeout_s):
                return bytes(await obstore.get_range_async(self._store, key, start=start, end=end))
        except FileNotFoundError:
            await self.ping()  # where the whole store is gone, nobody may conclude that an input is lost
            raise ObjectMissing(f"no object {key}") from None

    async def _delete(self, keys: Sequence[str]) -> None:
        try:
            async with translated("delete", self._timeout_s):
                await obstore.delete_async(self._store, list(keys))
        except FileNotFoundError:  # some stores say so, and then it is not known what became of the others
            for key in keys:
                await self._delete_one(key)

    async def _delete_one(self, key: str) -> None:
        try:
            async with translated("delete", self._timeout_s):
                await obstore.delete_async(self._store, key)
        except FileNotFoundError:
            return


def _pieces(ranges: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    for key, start, end in ranges:
        for first in range(start, end, PIECE_BYTES):
            yield key, first, min(end, first + PIECE_BYTES)


def _check_own(key: str) -> None:
    """Keys are made of our own ids only; anything else is a bug of ours, and stops here."""
    if not _OWN_KEY.fullmatch(key) or key.startswith("imports/"):
        raise ValueError(f"not a key of ours: {key!r}")
