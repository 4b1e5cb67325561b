"""The one place where the object store's own errors become ours."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from obstore.exceptions import BaseError

from serving.errors import DependencyDown, TwodoorError

_SHOWN_CHARS = 300
_log = structlog.get_logger("objects")


class ObjectMissing(TwodoorError):
    """No object has this key, or it has fewer bytes than were asked for; the store itself answers."""


@asynccontextmanager
async def translated(what: str, timeout_s: float) -> AsyncIterator[None]:
    """Bound one exchange with the store, and turn its errors into DependencyDown.

    FileNotFoundError passes: only the caller knows whether a missing object is an answer. Cancelling passes too.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except FileNotFoundError:
        raise
    except TimeoutError as exc:
        raise away(what, f"no answer within {timeout_s:g} s") from exc
    except (BaseError, OSError) as exc:  # a full disk, no permission, 5xx, a reset connection: all wait and come back
        raise away(what, str(exc)) from exc


def away(what: str, reason: str) -> DependencyDown:
    """Log why the store failed, for the operator, and return the error that says to callers only that it did."""
    _log.warning("object_store_down", operation=what, reason=reason.partition("\n")[0][:_SHOWN_CHARS])
    return DependencyDown("the object store does not answer")
