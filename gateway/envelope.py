"""What surrounds every request: its clock, its id, its span and its metrics, and an honest end of the connection.

Pure ASGI and outermost, so that the deadline starts at the request's head and nothing escapes it.
"""

import asyncio
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from opentelemetry.trace import SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.metrics import Metrics
from serving.telemetry import extract_context, is_tracing, span

_KEY = "twodoor.exchange"
_FIELDS = "twodoor.fields"
_GOOD_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# After an early answer the rest of a body is read for this long, so that the answer is not lost in a reset; then the
# connection is closed. A caller that waits for "100 Continue" sends no rest.
LINGER_S = 1.0
LINGER_BYTES = 8 * 2**20


@dataclass(slots=True)
class Exchange:
    """One request's own facts; ``started_s`` is on the monotonic clock."""

    started_s: float
    request_id: str
    body_pending: bool
    expects_continue: bool
    status: int = 499
    gone: bool = False
    read_any: bool = False

    def leave(self) -> None:
        """Note that the caller left: nothing more is read or sent."""
        self.gone = True
        self.body_pending = False


def exchange_of(scope: Scope) -> Exchange:
    """Return the facts of the request this scope belongs to."""
    return cast("Exchange", scope[_KEY])


def request_id_of(scope: Scope) -> str:
    """Return the request's id."""
    return exchange_of(scope).request_id


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return a header's value (several lines joined by a comma), or None; ``name`` in lower case."""
    fields: dict[bytes, bytes] | None = scope.get(_FIELDS)
    if fields is None:
        fields = scope[_FIELDS] = {}
        for key, value in scope["headers"]:
            fields[key] = fields[key] + b"," + value if key in fields else value
    return fields.get(name)


def new_request_id() -> str:
    """Return an id for a request that came without a usable one."""
    # Needs to be unlike any other and no secret, so that the system need not be asked for its randomness.
    return f"{random.getrandbits(128):032x}"


class Envelope:
    """The middleware. ``label`` gives the route's name in metrics for a path."""

    def __init__(self, app: ASGIApp, metrics: Metrics, label: Callable[[str], str]) -> None:
        self._app, self._metrics, self._label = app, metrics, label

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection. A WebSocket gets its id; its messages have metrics of their own."""
        if scope["type"] == "websocket":
            exchange = scope[_KEY] = _exchange(scope)
            await self._app(scope, receive, _named(exchange, send))
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _exchange(scope)
        scope[_KEY] = exchange
        route = self._label(scope["path"])
        within = (scope, _receive(exchange, receive), _send(exchange, receive, send))
        traceparent = header(scope, b"traceparent")
        try:
            if traceparent is None and not is_tracing():
                await self._app(*within)
                return
            carried = {"traceparent": traceparent.decode("latin-1")} if traceparent else {}
            with span(f"{scope['method']} {route}", extract_context(carried), SpanKind.SERVER) as current:
                await self._app(*within)
                current.set_attributes({"http.route": route, "http.response.status_code": exchange.status})
        finally:
            self._metrics.request_took(route, exchange.status, time.monotonic() - exchange.started_s)


def _exchange(scope: Scope) -> Exchange:
    started_s = time.monotonic()
    given, length, transfer, expect = (
        header(scope, name) for name in (b"x-request-id", b"content-length", b"transfer-encoding", b"expect")
    )
    return Exchange(
        started_s=started_s,
        request_id=given.decode() if given is not None and _GOOD_REQUEST_ID.fullmatch(given) else new_request_id(),
        body_pending=transfer is not None or (length is not None and length.strip(b"0") != b""),
        expects_continue=expect is not None and expect.lower() == b"100-continue",
    )


def _receive(exchange: Exchange, receive: Receive) -> Receive:
    async def wrapped() -> Message:
        exchange.read_any = True
        message = await receive()
        if message["type"] == "http.disconnect":
            exchange.leave()
        elif not message.get("more_body", False):
            exchange.body_pending = False
        return message

    return wrapped


def _send(exchange: Exchange, receive: Receive, send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if exchange.gone:
            return
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            headers = [*message["headers"], (b"x-request-id", exchange.request_id.encode())]
            if exchange.body_pending:
                headers.append((b"connection", b"close"))
            await send({**message, "headers": headers})
        elif exchange.body_pending and not message.get("more_body", False):
            await send({**message, "more_body": True})
            await _linger(exchange, receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await send(message)

    return wrapped


def _named(exchange: Exchange, send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] in ("websocket.accept", "websocket.http.response.start"):
            headers = [*message.get("headers", ()), (b"x-request-id", exchange.request_id.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return wrapped


async def _linger(exchange: Exchange, receive: Receive) -> None:
    """Read and drop the rest of a body within bounds: closing on unread bytes would reset the answer away."""
    if exchange.expects_continue and not exchange.read_any:
        return
    dropped_bytes = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while dropped_bytes < LINGER_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                dropped_bytes += len(message.get("body", b""))
    except (TimeoutError, asyncio.CancelledError):  # the server's stop ends only the wait: all was sent
        return
