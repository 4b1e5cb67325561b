"""The pieces of an upload: its bytes in even blocks, its fingerprint, and its sign of life."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from jobs.forms import JobRequest
from jobs.ledger import Uploads
from serving.errors import DependencyDown

BLOCK_BYTES = 256 * 2**10
"""What is hashed, cut and stored at once: large enough for a thread to pay, small enough to hold for every upload."""
_RENEWALS_PER_TTL = 3
_ITEMS = 1_000
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Fingerprint:
    """SHA-256 over model, options as given, and the body: what an Idempotency-Key stands for."""

    def __init__(self, request: JobRequest) -> None:
        options = [
            request.model,
            request.truncate,
            dict(request.metadata),
            request.completion_window_s,
            request.result_ttl_s,
            "inputs" if request.inputs is not None else "lines",
            request.input_object,
        ]
        self._hash = hashlib.sha256(json.dumps(options, sort_keys=True).encode() + b"\n")

    def update(self, block: bytes) -> None:
        """Add the next bytes of the body."""
        self._hash.update(block)

    def digest(self) -> bytes:
        """Return the 32 bytes."""
        return self._hash.digest()


class Renewal:
    """Renews an upload at a third of its time to live, while the block runs; the ledger may be away in between."""

    def __init__(self, ledger: Uploads, job_id: str, ttl_s: float) -> None:
        self._ledger, self._job_id, self._ttl_s = ledger, job_id, ttl_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self) -> None:
        """Raise DependencyDown once the upload has been swept."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise DependencyDown("the upload was given up meanwhile: send it again")

    async def _run(self) -> None:
        """End where the upload is lost."""
        while True:
            await asyncio.sleep(self._ttl_s / _RENEWALS_PER_TTL)
            try:
                if not await self._ledger.renew_upload(self._job_id, self._ttl_s):
                    return
            except DependencyDown:
                continue  # accept will tell whether the upload outlived the outage


async def blocks(body: AsyncIterator[bytes], size_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield a body in blocks of at least ``size_bytes``; only the last one may be smaller."""
    held = bytearray()
    async for piece in body:
        held += piece
        if len(held) >= size_bytes:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def as_jsonl(inputs: Sequence[Any]) -> AsyncGenerator[bytes, None]:
    """Yield one line of ASCII for each item, as it was given; some items at a time, off the event loop's thread."""
    for first in range(0, len(inputs), _ITEMS):
        yield await asyncio.to_thread(_lines, inputs[first : first + _ITEMS])


def _lines(items: Sequence[Any]) -> bytes:
    return b"".join(map(_line, items))


def _line(item: Any) -> bytes:
    try:
        return _ENCODER.encode(item).encode() + b"\n"
    except (ValueError, RecursionError):  # too deep, or 1e999: nothing that could be a row, so null fails like it
        return b"null\n"
