"""Work ends when its caller leaves, told by the server, and at nothing else."""

import asyncio

import pytest
from starlette.types import Message, Scope

from gateway.caller import put_presence, while_there
from gateway.envelope import Envelope, exchange_of
from gateway.metrics import Metrics
from gateway.problems import CallerGone


async def never() -> Message:
    raise AssertionError("nothing is read")


async def a_scope() -> Scope:
    """Return the scope of a request, as its envelope has made it."""
    found: list[Scope] = []

    async def app(scope: Scope, *_: object) -> None:
        found.append(scope)

    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": []}
    await Envelope(app, Metrics(), str)(scope, never, app)  # type: ignore[arg-type]
    return found[0]


async def test_a_caller_who_leaves_ends_the_work_and_gets_no_answer() -> None:
    scope = await a_scope()
    presence = put_presence(scope)
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    call = asyncio.create_task(while_there(scope, never, work()))
    await started.wait()
    presence.left()
    with pytest.raises(CallerGone):
        await call
    assert ended.is_set()
    assert exchange_of(scope).gone


async def test_for_a_caller_who_left_before_no_work_is_begun() -> None:
    scope = await a_scope()
    put_presence(scope).left()
    with pytest.raises(CallerGone):
        await while_there(scope, never, never())


async def test_a_caller_who_leaves_afterwards_ends_nothing() -> None:
    scope = await a_scope()
    presence = put_presence(scope)
    assert await while_there(scope, never, asyncio.sleep(0, "done")) == "done"
    presence.left()
    await asyncio.sleep(0)
    assert not exchange_of(scope).gone


async def test_a_stop_by_the_server_is_no_caller_who_left() -> None:
    scope = await a_scope()
    put_presence(scope)
    call = asyncio.create_task(while_there(scope, never, asyncio.sleep(60)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
