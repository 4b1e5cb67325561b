"""A local folder as object store: it also shows and removes what a killed writer left half written."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TypeVar

from obstore.store import LocalStore

from jobs.objects.away import ObjectMissing, away, translated
from jobs.objects.store import ObjectInfo, Objects

_FOLDER_MODE = 0o700
_PAGE = 1000
_THREADS = 4
T = TypeVar("T")


class LocalObjects(Objects):
    """Objects as files under ``folder``, which is made with mode 0700 where it does not exist.

    obstore writes ``<file>#<n>`` and renames it at the end, and hides those files from its lists: a process killed
    while it writes would leave them for ever. So here lists and deletes go to the file system itself.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        super().__init__(LocalStore(folder), timeout_s)
        self._folder = folder
        # Its own threads: a disk that hangs holds them for ever, and must not take those of the interactive door.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="objects")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def size(self, key: str) -> int:
        """Return a file's length in bytes; raises ObjectMissing."""
        try:
            async with translated("head", self._timeout_s):
                return await self._in_thread(lambda: self._file_size(key))
        except FileNotFoundError:
            await self.ping()
            raise ObjectMissing(f"no object {key}") from None

    async def list(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        """Yield the files under a prefix that ends with a slash, staged ones too (their keys end with ``#<n>``)."""
        files = self._walk(prefix)
        while True:
            async with translated("list", self._timeout_s):
                page = await self._in_thread(lambda: tuple(islice(files, _PAGE)))
            if not page:
                return
            for info in page:
                yield info

    async def ping(self) -> None:
        """Raise DependencyDown unless the folder is there."""
        async with translated("ping", self._timeout_s):
            if not await self._in_thread(self._folder.is_dir):
                raise away("ping", "the folder is not there")

    async def _delete(self, keys: Sequence[str]) -> None:
        async with translated("delete", self._timeout_s):
            await self._in_thread(lambda: self._remove(keys))

    def _file_size(self, key: str) -> int:
        try:
            path = self._path(key)
            if not path.is_file():
                raise FileNotFoundError(key)
            return path.stat().st_size
        except NotADirectoryError:  # a part of the name is a file
            raise FileNotFoundError(key) from None

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        for parent, _, names in os.walk(self._path(prefix.rstrip("/")), onerror=_unless_gone):
            for name in names:
                path = Path(parent, name)
                with suppress(FileNotFoundError):  # deleted, or renamed to its end, meanwhile
                    stat = path.stat()
                    key = path.relative_to(self._folder).as_posix()
                    yield ObjectInfo(key, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC))

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            path.unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self._folder:
                    break
                try:
                    parent.rmdir()
                except OSError:  # not empty, or gone already; a writer that needs it makes it again
                    break

    def _path(self, key: str) -> Path:
        if any(segment in ("", ".", "..") for segment in key.split("/")):
            raise ValueError(f"not a key: {key!r}")
        return self._folder.joinpath(key)


def _unless_gone(error: OSError) -> None:
    """A folder that was removed meanwhile holds nothing; one that cannot be read says that the store is in trouble."""
    if not isinstance(error, FileNotFoundError):
        raise error
