"""The HTTP protocol of the server: uvicorn's, with bounds on the size and the time of all that is around a body."""

import asyncio
import math
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.caller import Presence, put_presence
from gateway.connections import REFUSAL, Connections
from gateway.envelope import new_request_id
from gateway.stream_handshake import is_handshake
from gateway.stream_socket import StreamSocket
from gateway.write_clock import WriteClock
from serving.codec import encode_json
from serving.errors import Overloaded

# A connection over the bound has not long to say what it wants, before it is told to come later.
_TURNED_AWAY_HEAD_S = 2.0
# A full house is alive: refused probes would have it killed, and the operator would not see why.
_ALWAYS_SERVED = frozenset({"/healthz", "/readyz", "/metrics"})


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol has neither bound, and the app starts only after the head: slow and endless heads end here.

    So do trailers, which nothing here reads, and answers that nobody takes. An ``Upgrade`` is ignored, but for the
    WebSocket of the stream.
    """

    max_head_bytes: int
    head_timeout_s: float
    write_timeout_s: float
    min_bytes_per_s: int
    house: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_clock = WriteClock(self.write_timeout_s, self.min_bytes_per_s)
        self._close_timer: asyncio.TimerHandle | None = None
        self._welcome = True
        self._running: RequestResponseCycle | None = None
        self._presence: Presence | None = None
        self._in_head = True
        # Since the last whole head or piece of a body: part of a head, of trailers or of what else stands around chunks.
        self._around_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head; where there are too many connections, a short one."""
        super().connection_made(transport)
        self._welcome = self.house.welcome(self, self.connections)
        self._arm()
        if self.house.crowded and not self._welcome:
            self._turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell the request being answered: uvicorn tells the last one of the line only."""
        self.house.gone(self)
        self._disarm()
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.resume_writing()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            if self._presence is not None:
                self._presence.left()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what is no body, and refuse what is too large before more of it is kept."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._head_timer is None:
            self._arm()
        self._unset_keepalive_if_required()
        self._around_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self._around_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._refuse(431, "head_too_large", f"the head or the trailers are larger than {self.max_head_bytes} bytes")

    def eof_received(self) -> None:
        """Tell a caller who says that nothing more comes, in the middle of a body, that this was no whole request."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self._refuse(400, "invalid_body", "the body ended before its end")

    def on_message_begin(self) -> None:
        """Enter a head."""
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a field of the head; one of the trailers must not look like one of the head later."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Leave the head."""
        if self.parser.get_method() == b"CONNECT":
            raise httptools.HttpParserError("not a proxy")
        if self.parser.should_upgrade():
            return  # it comes again, see _feed
        self._disarm()
        self.house.works(self)
        self._in_head = False
        self._around_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass a piece of a body on."""
        self._around_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next head."""
        if self.parser.should_upgrade():
            return
        self._around_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Give the caller a bounded time to take some of what was written."""
        super().pause_writing()
        self._write_clock.start(self.transport)

    def resume_writing(self) -> None:
        """Stop that clock."""
        self._write_clock.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP with a problem, as every other error."""
        self._refuse(400, "invalid_request", "this is not an HTTP/1.1 request")

    def on_response_complete(self) -> None:
        """Rest, unless another request is in line; a connection that ends has a bounded time to take the last answer."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_closing()
        elif self.cycle.response_complete:
            self.house.rests(self)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that rested too long."""
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def leave(self) -> bool:
        """Make room for another connection, unless something is still to be sent."""
        if self.transport.get_write_buffer_size():
            return False
        self.transport.close()
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._presence = put_presence(cast("dict[str, Any]", cycle.scope))
        if not self._welcome:
            cycle.keep_alive = False
            if cycle.scope["path"] not in _ALWAYS_SERVED:
                app = self.house.refuse
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Parse. The parser takes what follows an ``Upgrade`` for another protocol, also the request's own body.

        A whole handshake for the stream has its way. No other protocol is spoken here, so any other head is parsed again
        without that field (RFC 9110 section 7.8).
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            if self._opens_stream():
                self._become_stream(data[exc.args[0] :])
                return
            lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
            lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
            self._feed(b"\r\n".join(lines) + b"\r\n\r\n" + data[exc.args[0] :])

    def _opens_stream(self) -> bool:
        """Return whether the head is a handshake for the stream. Behind a request that is still answered it is none."""
        idle = self._welcome and (self.cycle is None or self.cycle.response_complete)
        is_get = self.parser.get_method() == b"GET" and self.parser.get_http_version() == "1.1"
        return idle and is_get and is_handshake(self.url, self.headers)

    def _become_stream(self, early: bytes) -> None:
        """Hand the connection over; from here on it has the stream's clocks and bounds."""
        self._disarm()
        self.house.works(self)
        was_paused = self.flow.write_paused  # the transport tells nobody twice
        self.resume_writing()
        self._around_bytes = 0
        self.connections.discard(self)
        stream = cast("type[StreamSocket]", self.ws_protocol_class)(self.config, self.server_state, self.app_state)
        stream.connection_made(self.transport)
        self.transport.set_protocol(stream)
        if was_paused:
            stream.pause_writing()
        stream.begin(self.url, self.headers, early)

    def _turn_away(self) -> None:
        self._refuse(503, Overloaded.code, REFUSAL, f"retry-after: {math.ceil(self.house.retry_after_s())}")

    def _refuse(self, status: int, code: str, detail: str, *fields: str) -> None:
        """Answer with a problem and close; where the answer of an earlier request is still due, that is the last one."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._in_head:
                self.cycle.keep_alive = False
                self.flow.pause_reading()
                return
            if self.cycle.response_started or self.pipeline:
                self.transport.close()
                return
        title = HTTPStatus(status).phrase
        request_id = new_request_id()
        body = encode_json(
            {
                "type": "about:blank", "title": title, "status": status, "detail": detail, "code": code,
                "request_id": request_id,
            }
        )  # fmt: skip
        lines = [
            f"HTTP/1.1 {status} {title}",
            "content-type: application/problem+json",
            f"content-length: {len(body)}",
            f"x-request-id: {request_id}",
            "connection: close",
            *fields,
        ]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        """What is closed is gone only when all is sent: a peer that takes nothing must not keep it open."""
        if self._close_timer is None and self.transport.get_write_buffer_size():
            self._close_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def _arm(self) -> None:
        self._disarm()
        seconds = self.head_timeout_s if self._welcome else min(self.head_timeout_s, _TURNED_AWAY_HEAD_S)
        self._head_timer = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._welcome:
            self._turn_away()
            return
        self.transport.close()
        self._watch_closing()
