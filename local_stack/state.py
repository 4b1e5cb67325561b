"""The state folder: one lock, one state file, and what a killed stack left there."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Literal

from local_stack.process import Identity, ours
from serving.errors import ConfigError

ServiceState = Literal["starting", "ready", "restarting", "stopping", "stopped", "orphaned"]
Phase = Literal["starting", "up", "stopping", "stopped", "failed"]
# The order in which services are shown and started; they are stopped the other way round.
ORDER = ("postgres", "kafka", "triton", "gateway", "consumer")
_LOOK_S = 1.0
_POLL_S = 0.02


class AlreadyRunning(ConfigError):
    """Raised when another supervisor owns the state folder."""


@dataclass(slots=True)
class ServiceRecord:
    """What the state file says about one service."""

    name: str
    address: str
    state: ServiceState = "stopped"
    process: Identity | None = None
    command: list[str] = field(default_factory=list)
    restarts: int = 0

    @property
    def running(self) -> bool:
        """Whether the recorded process runs and is the one that was recorded."""
        return self.process is not None and ours(self.process, self.command)


@dataclass(slots=True)
class StackRecord:
    """What the state file says about the stack."""

    supervisor: Identity
    phase: Phase
    services: list[ServiceRecord]


class StateFolder:
    """Paths in ``TWODOOR_HOME`` and the files that tell other processes about the stack."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()
        self.logs = self.home / "logs"
        self.socket = self.home / "control.sock"
        self._state = self.home / "state.json"
        self._lock = self.home / "lock"

    def create(self) -> None:
        """Make the folder, readable by its owner only."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the folder; raises AlreadyRunning if another supervisor does. The kernel frees it however we end."""
        self.create()
        with self._lock.open("a") as handle:
            # `is_locked` of another process holds it for a moment: only what stays is a supervisor.
            deadline = time.monotonic() + _LOOK_S
            while not _try_lock(handle, fcntl.LOCK_EX):
                record = self.read()
                alive = record is not None and record.supervisor.alive
                if alive or time.monotonic() > deadline:
                    pid = record.supervisor.pid if record and alive else "that is just starting"
                    raise AlreadyRunning(
                        f"the stack runs already (supervisor {pid}, state in {self.home}): `twodoor status`, `twodoor down`"
                    )
                time.sleep(_POLL_S)
            yield

    def is_locked(self) -> bool:
        """Whether a supervisor owns the folder now."""
        if not self._lock.exists():
            return False
        with self._lock.open("a") as handle:
            return not _try_lock(handle, fcntl.LOCK_SH)

    def write(self, record: StackRecord) -> None:
        """Replace the state file; a reader sees the old one or the new one, never half of one."""
        temporary = self._state.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(record), indent=1))
        temporary.replace(self._state)

    def read(self) -> StackRecord | None:
        """Return the last state; None if there is none (or it is not ours to read: a damaged file counts as none)."""
        try:
            data = json.loads(self._state.read_text())
            services = [
                ServiceRecord(**{**s, "process": Identity(**s["process"]) if s["process"] else None})
                for s in data["services"]
            ]
            return StackRecord(Identity(**data["supervisor"]), data["phase"], services)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return None

    def log_path(self, name: str) -> Path:
        """Return the log file of a service."""
        return self.logs / f"{name}.log"


def _try_lock(handle: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def stop_order(name: str) -> int:
    """Return the place of a service (``consumer-2`` counts as a consumer) when the stack stops: last started first."""
    return -ORDER.index(name.split("-")[0])


def short_path_to(path: Path) -> tuple[int, str]:
    """Return (open descriptor of the folder, short path) for a Unix socket: its address may have 107 bytes only."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    return descriptor, f"/proc/self/fd/{descriptor}/{path.name}"
