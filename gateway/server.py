"""The HTTP server's own limits: uvicorn, with a bound on the size and on the time of a request's head."""

import asyncio
import socket
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.envelope import new_request_id
from serving.codec import encode_json
from serving.errors import ConfigError
from serving.settings import GatewaySettings

BACKLOG = 2048


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's protocol has neither bound, and the app starts only after the head: slow and endless heads end here."""

    max_head_bytes: int
    head_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head, and refuse one that is too large before it is kept."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._head_timer is None:
            self._arm()
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._refuse(431, "head_too_large", f"the request's head is larger than {self.max_head_bytes} bytes")

    def on_message_begin(self) -> None:
        """Enter a head."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Leave the head."""
        self._disarm()
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Wait for the next head."""
        super().on_response_complete()
        self._in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP with a problem, as every other error."""
        self._refuse(400, "invalid_request", "this is not an HTTP/1.1 request")

    def _refuse(self, status: int, code: str, detail: str) -> None:
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


def server_config(app: Any, settings: GatewaySettings) -> Config:
    """Return uvicorn's configuration: one process, uvloop, httptools, no access log (it would hold ``?text=``)."""
    limits = {"max_head_bytes": settings.max_head_bytes, "head_timeout_s": settings.head_timeout_s}
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
