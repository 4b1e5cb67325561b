"""Ports on loopback: which are taken, and by whom."""

import errno
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.errors import ConfigError

LOOPBACK = "127.0.0.1"
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port that a service needs, and the setting that moves it."""

    port: int
    setting: str


def check_free(uses: Iterable[PortUse]) -> None:
    """Raise ConfigError that names each port which is taken (by another program, or twice by us) and its setting."""
    problems = []
    seen: dict[int, str] = {}
    for use in uses:
        if use.port in seen:
            problems.append(f"{use.setting} and {seen[use.port]} are both {use.port}")
        elif not _is_free(use.port):
            problems.append(f"port {use.port} is in use{_owner(use.port)}: stop that program or set {use.setting}")
        seen[use.port] = use.setting
    if problems:
        raise ConfigError("; ".join(problems))


def free_ports(count: int) -> list[int]:
    """Return ports nobody uses at this moment; for tests, which must not meet the default ports.

    They lie below the range from which the kernel gives ports to outgoing connections, so they also stay free.
    """
    lowest = int(_EPHEMERAL.read_text().split()[0])
    first = min(10_000, lowest // 2)
    found: list[int] = []
    for candidate in random.sample(range(first, lowest), lowest - first):
        if len(found) == count:
            break
        if _is_free(candidate):
            found.append(candidate)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        # As servers do: connections that are only waiting to be forgotten do not count.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((LOOPBACK, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"port {port} cannot be used: {exc.strerror}") from exc
    return True


def _owner(port: int) -> str:
    """Return `` by NAME (pid N)`` where the system lets us see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""
