"""Waiting for an event: in time, too late, and cancelled at the worst moment."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from batch_consumer.waiting import happens
from serving.deadline import Deadline
from serving.settings import TritonSettings, load
from serving.triton_client import TritonClient
from tests.parts import ROOT

PACKAGES = ("batch_consumer", "gateway", "jobs", "local_stack", "model_builder", "serving", "twodoor")


async def test_an_event_that_happens_is_told_from_one_that_does_not() -> None:
    event = asyncio.Event()
    assert not await happens(event, 0.001)
    asyncio.get_running_loop().call_later(0.001, event.set)
    assert await happens(event, 30)
    assert await happens(event, 30)


async def test_a_cancellation_in_the_moment_in_which_the_event_happens_is_not_lost() -> None:
    event = asyncio.Event()

    async def for_ever() -> None:
        while True:
            event.clear()
            await happens(event, 30)

    task = asyncio.create_task(for_ever())
    await asyncio.sleep(0.01)
    event.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


async def test_a_cancellation_in_the_moment_in_which_the_model_answers_is_not_lost() -> None:
    client = TritonClient(load(TritonSettings))
    await client.close()
    answered = asyncio.Event()

    async def infer(*_: Any, **__: Any) -> Any:
        await answered.wait()
        return SimpleNamespace(as_numpy=lambda _: None)

    client._client = SimpleNamespace(infer=infer)
    task = asyncio.create_task(client.infer("m", "1", {}, "logits", Deadline.after_ms(30_000)))
    await asyncio.sleep(0.01)
    answered.set()
    # The answer is there, and whoever asked has not been woken yet.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_no_part_uses_the_wait_that_loses_cancellations() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    assert not [str(file) for file in files if re.search(r"\bimport wait_for|asyncio\.wait_for\(", file.read_text())]
