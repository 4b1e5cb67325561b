"""Tokenizers are read while Triton is still on its way: which of them it will serve is not known yet, where they lie is."""

import asyncio
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

from serving.models import tokenizer_sha256
from serving.startup import phase_done
from serving.tokenizer_files import Backend, load_backend, tokenizer_folders


class ReadAhead:
    """Owns the task, and the thread behind it, while it is entered; without that there is nothing read ahead."""

    def __init__(self, repository: Path, first: str) -> None:
        """``first``: the model whose tokenizer is read before those of the others."""
        self._repository, self._first = repository, first
        self._enough = Event()
        self._task: asyncio.Task[dict[str, Backend]] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="read tokenizers ahead")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enough.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def so_far(self) -> MutableMapping[str, Backend]:
        """Return hash → tokenizer of what was read. The thread ends after the one it is at: who asks knows what is needed.

        Who uses one takes it out: a tokenizer's settings must not be set while another model works with it.
        """
        self._enough.set()
        return {} if self._task is None else await asyncio.shield(self._task)

    def drop(self) -> None:
        """Forget what nobody took."""
        if self._task is not None and self._task.done():
            self._task = None

    def read(self) -> dict[str, Backend]:
        """Return hash → tokenizer of what can be read, until it is enough. Blocks.

        What is wrong with a folder is told when somebody needs it, who reads it again.
        """
        found: dict[str, Backend] = {}
        with suppress(OSError):
            for folder in tokenizer_folders(self._repository, self._first):
                if self._enough.is_set():
                    break
                with suppress(Exception):  # the libraries name no errors of their own
                    found[tokenizer_sha256(folder)] = load_backend(folder)
        return found

    async def _run(self) -> dict[str, Backend]:
        begin_s = time.monotonic()
        found = await asyncio.to_thread(self.read)
        phase_done("tokenizers", time.monotonic() - begin_s)
        return found
