"""A stack of one's own, for tests and benchmarks: any part of the services, own ports, own state folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from local_stack import postgres
from local_stack.control import send
from local_stack.logs import tail
from local_stack.ports import LOOPBACK, free_ports
from local_stack.process import wrapped
from local_stack.state import ORDER, ServiceRecord, StackRecord, StateFolder
from serving.errors import ConfigError
from serving.settings import StackSettings

_POLL_S = 0.05
_PORTS = (
    "TWODOOR_STACK_TRITON_HTTP_PORT",
    "TWODOOR_STACK_TRITON_GRPC_PORT",
    "TWODOOR_STACK_TRITON_METRICS_PORT",
    "TWODOOR_STACK_KAFKA_PORT",
    "TWODOOR_STACK_KAFKA_CONTROLLER_PORT",
    "TWODOOR_STACK_POSTGRES_PORT",
    "TWODOOR_GATEWAY_PORT",
    "TWODOOR_CONSUMER_PORT",
)


class Stack:
    """A supervisor in a process of its own, stopped at the end of the ``with`` block.

    It also ends, with all services, when the thread that called ``start`` ends, so that a killed test leaves nothing.

    ``home``: empty folder for state and logs. ``repository``: model repository. ``environment``: laid over the
    environment of supervisor and doors (settings of any part). Ports are free ones unless ``environment`` sets them.
    """

    def __init__(
        self,
        home: Path,
        services: Sequence[str] = ORDER,
        repository: Path | None = None,
        consumers: int = 1,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        self.home = home.absolute()
        self.services = tuple(services)
        self._consumers = consumers
        self._start_timeout_s = start_timeout_s
        self._folder = StateFolder(self.home)
        self._process: subprocess.Popen[bytes] | None = None
        own = dict(environment or {})
        if repository is not None:
            own["TWODOOR_MODELS_REPOSITORY"] = str(repository.absolute())
        own["TWODOOR_HOME"] = str(self.home)
        self.objects = self.home / "objects"
        """The folder with the inputs and results of jobs."""
        chosen = dict(zip(_PORTS, map(str, free_ports(len(_PORTS))), strict=True))
        ports = {name: own.get(name, port) for name, port in chosen.items()}
        self.triton_http = f"{LOOPBACK}:{ports['TWODOOR_STACK_TRITON_HTTP_PORT']}"
        self.triton_grpc = f"{LOOPBACK}:{ports['TWODOOR_STACK_TRITON_GRPC_PORT']}"
        self.triton_metrics = f"{LOOPBACK}:{ports['TWODOOR_STACK_TRITON_METRICS_PORT']}"
        self.kafka = f"{LOOPBACK}:{ports['TWODOOR_STACK_KAFKA_PORT']}"
        self.gateway_url = f"http://{LOOPBACK}:{ports['TWODOOR_GATEWAY_PORT']}"
        self.database_url = own.get("TWODOOR_JOBS_DATABASE_URL") or self._database_url(
            int(ports["TWODOOR_STACK_POSTGRES_PORT"])
        )
        """The ledger's database, with its password; empty where the stack has none."""
        self.environment: dict[str, str] = {
            "TWODOOR_TRITON_GRPC_ADDRESS": self.triton_grpc,
            "TWODOOR_KAFKA_BOOTSTRAP_SERVERS": self.kafka,
            "TWODOOR_CLIENT_URL": self.gateway_url,
            **({"TWODOOR_JOBS_DATABASE_URL": self.database_url} if self.database_url else {}),
            **({"TWODOOR_JOBS_OBJECTS_URL": self.objects.as_uri()} if self.database_url else {}),
            **ports,
            **own,
        }
        """What a process needs in its environment to find this stack."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the supervisor and wait until every service is ready; raises ConfigError with its last lines."""
        if self._process is not None and self._process.poll() is None:
            raise ConfigError("the stack is running")
        self._folder.create()
        command = [
            sys.executable, "-m", "local_stack", "up",
            "--services", ",".join(self.services), "--consumers", str(self._consumers),
        ]  # fmt: skip
        environment = {**os.environ, **self.environment}
        path = [str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        with self.log_path("supervisor").open("ab") as log:
            self._process = subprocess.Popen(
                wrapped(command, 0), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            record = self._folder.read()
            if record and record.supervisor.pid == self._process.pid and record.phase == "up":
                return self
            time.sleep(_POLL_S)
        lines = "\n".join(tail(self.log_path("supervisor"), 5))
        raise ConfigError(f"the stack did not come up:\n{lines}")

    def stop(self) -> None:
        """Stop everything in order; nothing of it runs afterwards."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process = process
            self.kill()

    def kill(self) -> None:
        """End supervisor and services with SIGKILL, as a power cut would."""
        record = self._folder.read()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(timeout=10)
        for service in record.services if record else ():
            if service.running and service.process:
                service.process.signal_group(signal.SIGKILL)

    def _database_url(self, port: int) -> str:
        if "postgres" not in self.services:
            return ""
        settings: dict[str, Any] = {"home": self.home, "postgres_port": port}
        return postgres.url(StackSettings(**settings))

    @property
    def supervisor_pid(self) -> int:
        """Pid of the supervisor; raises ConfigError if it does not run."""
        if self._process is None:
            raise ConfigError("the stack is not running")
        return self._process.pid

    def status(self) -> dict[str, ServiceRecord]:
        """Return name → state, pid, address and number of restarts as the supervisor sees them now."""
        return {service.name: service for service in self._record().services}

    def pid(self, name: str) -> int:
        """Return the pid of a running service; raises ConfigError if it does not run now."""
        process = self.status()[name].process
        if process is None:
            raise ConfigError(f"{name} does not run now")
        return process.pid

    def stop_service(self, name: str) -> None:
        """Stop one service and keep it stopped."""
        send(self._folder.socket, "stop", name, 30.0)

    def start_service(self, name: str) -> None:
        """Start a stopped service and wait until it is ready."""
        send(self._folder.socket, "start", name, 30.0)
        self.wait_ready(name)

    def restart(self, name: str) -> None:
        """Stop and start one service and wait until it is ready."""
        send(self._folder.socket, "restart", name, 30.0)
        self.wait_ready(name)

    def wait_ready(self, name: str, timeout_s: float = 60.0, other_than: int | None = None) -> None:
        """Wait until a service is ready (with another pid than ``other_than``); raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            service = self.status()[name]
            if service.state == "ready" and service.process and service.process.pid != other_than:
                return
            time.sleep(_POLL_S)
        raise TimeoutError(f"{name} was not ready within {timeout_s:.0f} s: {tail(self.log_path(name), 3)}")

    def log_path(self, name: str) -> Path:
        """Return the log file of a service, or of the ``supervisor``."""
        return self._folder.log_path(name)

    def lines(self) -> list[str]:
        """Return what the supervisor has said so far."""
        return self.log_path("supervisor").read_text().splitlines()

    def _record(self) -> StackRecord:
        record = self._folder.read()
        if record is None:
            raise ConfigError("the stack was never started")
        return record
