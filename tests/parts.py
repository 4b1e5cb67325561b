"""The real parts as child processes of the tests: Triton by the local stack's own command line, the doors by ``-m``."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Self

import psycopg
from psycopg import sql

from local_stack import postgres, triton
from local_stack.config import StackConfig
from local_stack.process import wrapped
from serving.settings import ConsumerSettings, GatewaySettings, KafkaSettings, ModelSettings, StackSettings, load

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "template_twodoor"
WORKERS = 2
"""How many of pytest's workers `make test` uses at one time."""


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different, below the range the kernel gives to outgoing calls.

    Each of pytest's workers has a part of that range to itself: two that look at the same moment would find the same.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    part = max(1_000, (lowest - 11_000) // WORKERS)
    found: list[int] = []
    # The last 500 of a part are left for the ports that follow a start near its end.
    candidate = 10_000 + worker * part + (os.getpid() * 37 + int(time.monotonic() * 1000)) % (part - 500)
    while len(found) < count:
        candidate += 1
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
        found.append(candidate)
    return found


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0, every_s: float = 0.05) -> None:
    """Poll a condition; fails with ``what`` when it does not come true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(every_s)


def answers(url: str) -> bool:
    """Return whether a GET gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


class Process:
    """A child with its output in a file; ``stop`` is graceful, ``kill`` is not."""

    def __init__(self, command: list[str], env: Mapping[str, str], log: Path, cwd: Path = ROOT) -> None:
        self.command, self.env, self.log_file, self.cwd = command, dict(env), log, cwd
        self._output: IO[bytes] | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def child(self) -> "subprocess.Popen[bytes]":
        """The running process."""
        assert self._child is not None, "not started"
        return self._child

    def start(self) -> Self:
        """Start it; the caller waits for readiness."""
        # A previous run's environment of settings must not leak into a part.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TWODOOR_")}
        self._output = self.log_file.open("ab")
        self._child = subprocess.Popen(
            self.command, env={**inherited, **self.env}, cwd=self.cwd, stdout=self._output, stderr=self._output,
            process_group=0,
        )  # fmt: skip
        return self

    def send(self, sig: int) -> None:
        """Send a signal to this process alone."""
        self.child.send_signal(sig)

    def stop(self, timeout_s: float = 20.0) -> int:
        """End it with SIGTERM and return its exit code."""
        return self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> int:
        """End it, and the group it leads, with SIGKILL."""
        if self._child is not None and self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
        return self._end(signal.SIGKILL, 10)

    def log(self) -> str:
        """Return what it has written so far."""
        return self.log_file.read_text(errors="replace")

    def _end(self, sig: int, timeout_s: float) -> int:
        if self._child is None:
            return 0
        if self._child.poll() is None:
            self._child.send_signal(sig)
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait(10)
            raise AssertionError(f"{self.command[:3]} did not end within {timeout_s:g} s:\n{self.log()}") from None
        finally:
            if self._output is not None:
                self._output.close()
                self._output = None


class Triton(Process):
    """A real Triton over one repository, on free ports."""

    def __init__(self, home: Path, repository: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        http, grpc, metrics, *rest = free_ports(7)
        self.http_port, self.repository = http, repository
        self.grpc_address = f"127.0.0.1:{grpc}"
        venv = Path(os.environ.get("TWODOOR_STACK_TRITON_VENV", ROOT / ".venv-triton"))
        stack: dict[str, Any] = {
            "home": home,
            "triton_venv": venv,
            "triton_http_port": http,
            "triton_grpc_port": grpc,
            "triton_metrics_port": metrics,
        }
        doors: list[dict[str, Any]] = [{"port": port} for port in rest[:2]]
        models: dict[str, Any] = {"repository": repository}
        self.config = StackConfig(
            StackSettings(**stack),
            load(KafkaSettings),
            GatewaySettings(**doors[0]),
            ConsumerSettings(**doors[1]),
            ModelSettings(**models),
            services=("triton",),
        )
        environment = triton.Installation.find(venv).environment()
        super().__init__([], environment, home / "triton.log")

    def start(self) -> Self:
        """Start it and wait until every model of the repository is ready."""
        triton.prepare(self.config)
        self.command = triton.command(self.config)
        super().start()
        try:
            wait_until(self._ready, "Triton ready", timeout_s=90)
        except AssertionError as exc:
            self.kill()
            raise AssertionError(f"{exc}\n{self.log()[-4000:]}") from None
        return self

    def restart(self) -> None:
        """End it at once and start it again on the same ports."""
        self.kill()
        self.start()

    def load(self, name: str) -> None:
        """Load (or load again) one model."""
        self._control(name, "load")

    def unload(self, name: str) -> None:
        """Unload one model and wait until it is gone."""
        self._control(name, "unload")
        wait_until(lambda: not self.model_ready(name), f"{name} unloaded")

    def model_ready(self, name: str) -> bool:
        """Return whether Triton says the model is ready."""
        return answers(f"http://127.0.0.1:{self.http_port}/v2/models/{name}/ready")

    def _ready(self) -> bool:
        if self.child.poll() is not None:
            raise AssertionError(f"Triton ended with {self.child.returncode}")
        return all(self.model_ready(name) for name in triton.model_names(self.repository))

    def _control(self, name: str, verb: str) -> None:
        url = f"http://127.0.0.1:{self.http_port}/v2/repository/models/{name}/{verb}"
        with urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="POST"), timeout=60) as response:
            assert response.status == 200

    def _end(self, sig: int, timeout_s: float) -> int:
        code = super()._end(sig, timeout_s)
        triton.clean_shared_memory(self.config)
        return code


class Postgres(Process):
    """A real PostgreSQL on a free port, by the local stack's own command line; each of its databases is migrated."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        settings: dict[str, Any] = {"home": home, "postgres_port": self.port}
        self.settings = StackSettings(**settings)
        self._databases = 0
        super().__init__([], {}, home / "postgres.log")

    def start(self) -> Self:
        """Start it and wait until it answers."""
        postgres.prepare(self.settings)
        data = postgres.data_folder(self.settings)
        # Processes are killed here, never the machine: no need to wait for the disk.
        self.command = wrapped([*postgres.command(self.settings), "-c", "fsync=off"], 0, data, tied=False)
        super().start()
        try:
            wait_until(self._ready, "PostgreSQL ready")
        except AssertionError as exc:
            self.kill()
            raise AssertionError(f"{exc}\n{self.log()[-4000:]}") from None
        return self

    def stop(self, timeout_s: float = 20.0) -> int:
        """End it in order at once, whoever is connected."""
        return self._end(signal.SIGINT, timeout_s)

    def kill(self) -> int:
        """End the server and all its processes with SIGKILL."""
        code = super().kill()
        postgres.end_leftovers(self.settings)
        return code

    def restart(self) -> None:
        """Kill it and start it again on the same port, with what it holds."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """Stop every process of it (SIGSTOP): connections stay open and nothing is answered, until ``thaw``."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on after ``freeze``."""
        self._signal_all(signal.SIGCONT)

    def new_database(self) -> str:
        """Make a database with the newest schema and return its URL; costs milliseconds."""
        with self._admin() as connection:
            if not self._databases:
                self._make_template(connection)
            self._databases += 1
            name = f"test_{self._databases}"
            self._create(connection, name, TEMPLATE)
        return postgres.url(self.settings, database=name)

    def drop_database(self, url: str) -> None:
        """Remove a database, whoever is still connected to it."""
        with self._admin() as connection:
            name = sql.Identifier(url.rsplit("/", 1)[1])
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))

    def _make_template(self, connection: "psycopg.Connection") -> None:
        password = postgres.password(self.settings)
        role = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
        connection.execute(role.format(sql.Identifier(postgres.ROLE), sql.Literal(password)))
        self._create(connection, TEMPLATE)
        url = postgres.url(self.settings, database=TEMPLATE)
        done = subprocess.run(
            [sys.executable, "-m", "jobs.migrations"],
            env={**os.environ, "TWODOOR_JOBS_DATABASE_URL": url},
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def _create(self, connection: "psycopg.Connection", name: str, template: str | None = None) -> None:
        names = [sql.Identifier(name), sql.Identifier(postgres.ROLE)]
        if template:
            statement = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {}").format(*names, sql.Identifier(template))
        else:
            statement = sql.SQL("CREATE DATABASE {} OWNER {}").format(*names)
        connection.execute(statement)

    def _admin(self) -> "psycopg.Connection":
        url = postgres.url(self.settings, postgres.ADMIN, "postgres")
        return psycopg.connect(url, autocommit=True, connect_timeout=5)

    def _ready(self) -> bool:
        if self.child.poll() is not None:
            raise AssertionError(f"PostgreSQL ended with {self.child.returncode}")
        try:
            with self._admin():
                return True
        except psycopg.OperationalError:
            return False

    def _signal_all(self, number: int) -> None:
        for pid in postgres.processes(postgres.data_folder(self.settings)):
            os.kill(pid, number)


class Gateway(Process):
    """A real ``python -m gateway`` on a free port."""

    def __init__(self, folder: Path, triton_address: str, repository: Path, **settings: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        env = {
            "TWODOOR_GATEWAY_PORT": str(self.port),
            "TWODOOR_TRITON_GRPC_ADDRESS": triton_address,
            "TWODOOR_TRITON_POLL_INTERVAL_S": "0.2",
            "TWODOOR_MODELS_REPOSITORY": str(repository),
            **{name: str(value) for name, value in settings.items()},
        }
        super().__init__([sys.executable, "-m", "gateway"], env, folder / f"gateway-{self.port}.log")

    def start(self, *, triton_up: bool = True) -> Self:
        """Start it and wait until it answers (and, unless told otherwise, until it sees Triton)."""
        super().start()
        try:
            wait_until(self._ready, "gateway ready")
            if triton_up:
                wait_until(lambda: b'"up"' in self.get("/readyz"), "gateway sees Triton")
        except AssertionError as exc:
            self.kill()
            raise AssertionError(f"{exc}\n{self.log()[-4000:]}") from None
        return self

    def launch(self) -> Self:
        """Start it and wait for nothing."""
        return super().start()

    def get(self, path: str) -> bytes:
        """Return the body of a GET that gives 200."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=5) as response:
            content: bytes = response.read()
            return content

    def _ready(self) -> bool:
        if self.child.poll() is not None:
            raise AssertionError(f"gateway ended with {self.child.returncode}")
        return answers(f"{self.url}/healthz")


def remove(folder: Path) -> None:
    """Remove a folder of a session fixture, which may hold hard links to models."""
    shutil.rmtree(folder, ignore_errors=True)
