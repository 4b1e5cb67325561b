"""The HTTP server as it is configured here: its limits, its socket, and what the signal to stop does."""

import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

from uvicorn import Config, Server

from gateway.connections import Connections
from gateway.filelimit import turned_away_for
from gateway.limited_http import LimitedHttp
from gateway.stream_socket import StreamSocket, Unfinished
from serving.errors import ConfigError
from serving.settings import GatewaySettings

BACKLOG = 4096


class DoorServer(Server):
    """A server that tells the app of the signal to stop: who waits for a job's end must not hold it up."""

    def __init__(self, config: Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take the signal."""
        self._on_stop()
        super().handle_exit(sig, frame)


def server_config(app: Any, settings: GatewaySettings, max_connections: int | None = None) -> Config:
    """Return uvicorn's configuration: one process, uvloop, httptools, no access log (it would hold ``?text=``).

    ``max_connections`` is less than the setting where there may be fewer open files.
    """
    most = settings.max_connections if max_connections is None else max_connections
    limits = {
        "max_head_bytes": settings.max_head_bytes,
        "head_timeout_s": settings.head_timeout_s,
        "write_timeout_s": settings.body_timeout_s,
        "min_bytes_per_s": settings.min_transfer_bytes_per_s,
        "house": Connections(most, turned_away_for(most), app.state.metrics),
    }
    stream_limits = {
        "message_timeout_s": settings.body_timeout_s,
        "write_timeout_s": settings.body_timeout_s,
        "min_bytes_per_s": settings.min_transfer_bytes_per_s,
        "unfinished": Unfinished(settings.max_buffered_bytes),
    }
    return Config(
        app,
        loop="uvloop",
        http=type("Http", (LimitedHttp,), limits),
        ws=type("Stream", (StreamSocket,), stream_limits),
        ws_max_size=settings.stream_max_message_bytes,
        ws_ping_interval=settings.stream_ping_interval_s,
        ws_ping_timeout=settings.stream_ping_timeout_s,
        ws_per_message_deflate=False,
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
