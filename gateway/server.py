"""The HTTP server's own limits: uvicorn, with bounds on the size and the time of all that is around a body."""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import httptools
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.envelope import new_request_id
from serving.codec import encode_json
from serving.errors import ConfigError
from serving.settings import GatewaySettings

BACKLOG = 2048


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol has neither bound, and the app starts only after the head: slow and endless heads end here.

    So do trailers, which nothing here reads, and answers that nobody takes. An ``Upgrade`` is ignored.
    """

    max_head_bytes: int
    head_timeout_s: float
    write_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        self._in_head = True
        # Since the last whole head or piece of a body: part of a head, of trailers or of what else stands around chunks.
        self._around_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks, and tell the request being answered: uvicorn tells the last one of the line only."""
        self._disarm()
        self.resume_writing()
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
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
        self._watch_writing()

    def resume_writing(self) -> None:
        """Stop that clock."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP with a problem, as every other error."""
        self._refuse(400, "invalid_request", "this is not an HTTP/1.1 request")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Parse. The parser takes what follows an ``Upgrade`` for another protocol, also the request's own body.

        No other protocol is spoken here, so the head is parsed again without that field (RFC 9110 section 7.8).
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
            lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
            self._feed(b"\r\n".join(lines) + b"\r\n\r\n" + data[exc.args[0] :])

    def _refuse(self, status: int, code: str, detail: str) -> None:
        """Answer with a problem and close; where the answer of an earlier request is still due, that is the last one."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._in_head:
                self.cycle.keep_alive = False
                self.flow.pause_reading()
                return
            if self.cycle.response_started or self.pipeline:
                self.transport.close()
                return
        title = {400: "Bad Request", 431: "Request Header Fields Too Large"}[status]
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
        ]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.transport.close()

    def _watch_writing(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._check_writing, unsent_bytes)

    def _check_writing(self, before_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < before_bytes:
            self._watch_writing()
        else:
            self.transport.abort()

    def _arm(self) -> None:
        self._disarm()
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


class DoorServer(Server):
    """A server that tells the app of the signal to stop: who waits for a job's end must not hold it up."""

    def __init__(self, config: Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take the signal."""
        self._on_stop()
        super().handle_exit(sig, frame)


def server_config(app: Any, settings: GatewaySettings) -> Config:
    """Return uvicorn's configuration: one process, uvloop, httptools, no access log (it would hold ``?text=``)."""
    limits = {
        "max_head_bytes": settings.max_head_bytes,
        "head_timeout_s": settings.head_timeout_s,
        "write_timeout_s": settings.body_timeout_s,
    }
    return Config(
        app,
        loop="uvloop",
        http=type("Http", (LimitedHttp,), limits),
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=round(settings.keep_alive_timeout_s),
        timeout_graceful_shutdown=round(settings.shutdown_timeout_s),
    )


def bind(settings: GatewaySettings) -> socket.socket:
    """Return a listening socket at the settings' address; raises ConfigError that names the settings."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"TWODOOR_GATEWAY_HOST={settings.host} TWODOOR_GATEWAY_PORT={settings.port} cannot be used: {exc.strerror}"
        ) from exc
    return sock
