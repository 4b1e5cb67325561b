"""The pace of a job's body: pauses are allowed, and pay for themselves by what was sent."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import Message, Receive

from gateway.metrics import Metrics
from gateway.problems import Problem
from gateway.uploads import Uploads
from serving.settings import GatewaySettings

SCOPE: dict[str, Any] = {"type": "http", "headers": []}


def sender(pieces: Sequence[tuple[float, bytes]]) -> Receive:
    """Return a receive that waits so many seconds before each piece; the last one ends the body."""
    left = list(pieces)

    async def receive() -> Message:
        wait_s, piece = left.pop(0)
        await asyncio.sleep(wait_s)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    return receive


async def body(pieces: Sequence[tuple[float, bytes]]) -> bytes:
    settings: dict[str, Any] = {"upload_idle_timeout_s": 0.3, "min_transfer_bytes_per_s": 1_000}
    uploads = Uploads(GatewaySettings(**settings), Metrics())
    return b"".join([piece async for piece in uploads.body(SCOPE, sender(pieces))])


async def test_a_body_of_a_byte_a_moment_is_408_after_its_time_as_a_whole() -> None:
    with pytest.raises(Problem) as caught:
        await body([(0.05, b"x")] * 1_000)
    assert (caught.value.status, caught.value.code, caught.value.limit) == (408, "body_timeout", 1_000)


async def test_a_pause_is_408() -> None:
    with pytest.raises(Problem) as caught:
        await body([(0, b"x" * 10_000), (2, b"x")])
    assert (caught.value.status, caught.value.code, caught.value.limit) == (408, "body_timeout", 0.3)


async def test_many_pauses_of_a_body_that_keeps_the_pace_are_fine() -> None:
    assert len(await body([(0.1, b"x" * 500)] * 8)) == 4_000
