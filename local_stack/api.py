"""What the `twodoor` command calls: up, down, status, log_path. Each returns what the command prints or exits with."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from local_stack.config import StackConfig
from local_stack.logs import trim
from local_stack.process import end
from local_stack.state import ORDER, ServiceRecord, StackRecord, StateFolder, stop_order
from local_stack.supervisor import ORPHAN_GRACE_S, Supervisor
from local_stack.triton import model_names
from serving.errors import ConfigError
from serving.settings import unknown_variables

_POLL_S = 0.1
# The supervisor stops within TWODOOR_STACK_STOP_TIMEOUT_S; this is for what comes after.
_DOWN_MARGIN_S = 1.5


def say(line: str) -> None:
    """Print one status line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def up(
    detach: bool = False,
    consumers: int | None = None,
    services: Sequence[str] = ORDER,
    report: Callable[[str], None] = say,
) -> int:
    """Start the stack: in the foreground until Ctrl-C or SIGTERM, or detached, then return once all is ready.

    Returns 0, or 1 after one line that says what is wrong (it runs already, a port is taken, a part is missing).
    """
    try:
        config = StackConfig.load(tuple(services), consumers)
        for doubt in doubts(config):
            report(f"warning: {doubt}")
        if detach:
            return _up_detached(config, report)
        return asyncio.run(Supervisor(config, report).run())
    except ConfigError as exc:
        report(f"cannot start: {exc}")
        return 1


def doubts(config: StackConfig) -> Iterator[str]:
    """Yield what does not stop a start and is most often a typing error."""
    for name in unknown_variables():
        yield f"{name} is set and means nothing: see docs/settings.md"
    names = model_names(config.repository)
    if names and config.models.default not in names:
        yield f"TWODOOR_MODELS_DEFAULT: no model {config.models.default} in {config.repository}"
    objects = os.environ.get("TWODOOR_JOBS_OBJECTS_URL", "")
    if "postgres" in config.services and objects not in ("", config.objects.as_uri()):
        yield (
            "TWODOOR_JOBS_OBJECTS_URL names a store of your own beside the local PostgreSQL: what lies there under jobs/ "
            "and this database does not know is deleted, so no other installation may use it"
        )


def down(report: Callable[[str], None] = say) -> int:
    """Stop the stack from another process and wait for its end; also ends what a killed supervisor left."""
    try:
        config = StackConfig.load()
    except ConfigError as exc:
        report(f"cannot stop: {exc}")
        return 1
    folder = StateFolder(config.stack.home)
    record = folder.read()
    if record is None:
        report(f"no stack was started with the state folder {folder.home} (TWODOOR_HOME names another one)")
        return 0
    if folder.is_locked() and record.supervisor.alive:
        return _stop_supervisor(folder, record, config.stack.stop_timeout_s, report)
    left = sorted((s for s in record.services if s.running), key=lambda s: stop_order(s.name))
    for service in left:
        _end_orphan(service)
    names = ", ".join(s.name for s in left)
    report(f"stopped what a killed supervisor had left running: {names}" if left else "the stack is not running")
    return 0


def status() -> dict[str, Any]:
    """Return ``{"services": [{"name", "state", "pid", "address"}]}`` as it is now; raises ConfigError.

    States: starting, ready, restarting, stopping, stopped, orphaned (it runs, but its supervisor was killed).
    """
    config = StackConfig.load()
    folder = StateFolder(config.stack.home)
    record = folder.read()
    supervised = record is not None and folder.is_locked() and record.supervisor.alive
    if record is None or not (supervised or any(s.running for s in record.services)):
        services = [_view(ServiceRecord(name, config.address(name))) for name in config.names]
    else:
        services = [_view(s if supervised else _orphan(s)) for s in record.services]
    return {"services": services}


def log_path(name: str) -> Path:
    """Return the log file of a service (or of the detached ``supervisor``); raises ConfigError for an unknown name."""
    folder = StateFolder(StackConfig.load().stack.home)
    path = folder.log_path(name)
    known = sorted(p.stem for p in folder.logs.glob("*.log")) if folder.logs.exists() else []
    if name not in known:
        raise ConfigError(f"no log of {name!r}; there are {', '.join(known) or 'none yet: start the stack first'}")
    return path


def _view(record: ServiceRecord) -> dict[str, Any]:
    pid = record.process.pid if record.process else None
    return {"name": record.name, "state": record.state, "pid": pid, "address": record.address}


def _orphan(record: ServiceRecord) -> ServiceRecord:
    if record.running:
        return ServiceRecord(record.name, record.address, "orphaned", record.process)
    return ServiceRecord(record.name, record.address)


def _end_orphan(service: ServiceRecord) -> None:
    if service.process:
        end([service.process], ORPHAN_GRACE_S)


def _stop_supervisor(folder: StateFolder, record: StackRecord, timeout_s: float, report: Callable[[str], None]) -> int:
    supervisor = record.supervisor
    supervisor.signal(15)
    deadline = time.monotonic() + timeout_s + _DOWN_MARGIN_S
    while supervisor.alive and folder.is_locked():
        if time.monotonic() > deadline:
            supervisor.signal(9)
            for service in (folder.read() or record).services:
                if service.running and service.process:
                    service.process.signal_group(9)
            report("the supervisor did not end in time; everything was killed")
            return 1
        time.sleep(_POLL_S)
    # The lock is given back a moment before the process is gone.
    last_s = time.monotonic() + _DOWN_MARGIN_S
    while supervisor.alive and time.monotonic() < last_s:
        time.sleep(_POLL_S)
    report("the stack is down")
    return 0


def _up_detached(config: StackConfig, report: Callable[[str], None]) -> int:
    """Start a supervisor that outlives us and pass its lines on until the stack is up."""
    folder = StateFolder(config.stack.home)
    with folder.locked():
        pass  # refuses here, with one line, if the stack runs already
    log = folder.log_path("supervisor")
    trim(log, config.stack.log_max_bytes // 4)
    command = [
        sys.executable, "-m", "local_stack", "up",
        "--consumers", str(config.consumers), "--services", ",".join(config.services),
    ]  # fmt: skip
    with log.open("ab") as output:
        position = output.tell()
        supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
            # One session for the whole stack, away from this terminal: the services stay inside it.
            start_new_session=True,
        )
    try:
        return _follow(supervisor, folder, log, position, report)
    except KeyboardInterrupt:
        report("the stack goes on starting: `twodoor down` stops it")
        return 130


def _follow(
    supervisor: "subprocess.Popen[bytes]", folder: StateFolder, log: Path, position: int, report: Callable[[str], None]
) -> int:
    """Pass the supervisor's lines on until the stack is up (0) or has ended (1)."""
    while True:
        ended = supervisor.poll()
        position = _pass_on(log, position, report)
        record = folder.read()
        if ended is not None:
            return 1
        if record and record.supervisor.pid == supervisor.pid and record.phase == "up":
            _pass_on(log, position, report)
            supervisor.returncode = 0  # it goes on without us: no warning that it still runs
            return 0
        time.sleep(_POLL_S)


def _pass_on(log: Path, position: int, report: Callable[[str], None]) -> int:
    """Report the complete lines after ``position`` and return where they end."""
    with log.open("rb") as handle:
        handle.seek(position)
        data = handle.read()
    complete = data[: data.rfind(b"\n") + 1]
    for line in complete.decode(errors="replace").splitlines():
        report(line)
    return position + len(complete)
