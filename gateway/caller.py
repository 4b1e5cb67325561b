"""Work that ends when its caller leaves, without a task of its own to watch for that."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from starlette.types import Receive, Scope

from gateway.envelope import exchange_of
from gateway.problems import CallerGone

T = TypeVar("T")
_KEY = "twodoor.presence"


class Presence:
    """Whether the caller of one request is there; the server says when it is not any more."""

    __slots__ = ("_gone", "_tell")

    def __init__(self) -> None:
        self._tell: Callable[[], object] | None = None
        self._gone = False

    def is_gone(self) -> bool:
        """Return whether the connection is lost."""
        return self._gone

    def left(self) -> None:
        """Note that the connection is lost (called by the server)."""
        self._gone = True
        if self._tell is not None:
            self._tell()

    def watch(self, tell: Callable[[], object] | None) -> None:
        """Say whom to tell; None = nobody any more."""
        self._tell = tell


def put_presence(scope: Scope) -> Presence:
    """Give a request its presence (done by a server that can tell)."""
    presence = scope[_KEY] = Presence()
    return presence


async def while_there(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; a caller who leaves ends the work, and CallerGone is raised."""
    presence: Presence | None = scope.get(_KEY)
    if presence is None:
        return await while_connected(receive, work)
    if presence.is_gone():
        work.close()
        exchange_of(scope).leave()
        raise CallerGone
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    presence.watch(task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if not presence.is_gone():
            raise
        task.uncancel()
        exchange_of(scope).leave()
        raise CallerGone from None
    finally:
        presence.watch(None)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the same by reading on, for a server that cannot tell."""
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise CallerGone from None
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
