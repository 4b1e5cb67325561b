"""The local stack's PostgreSQL: kept, closed to others, and back at once whatever was killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from local_stack import Stack
from local_stack.postgres import data_folder, processes
from local_stack.process import children, command_line, identify
from local_stack.state import ServiceRecord, StackRecord, StateFolder
from serving.settings import StackSettings
from tests.parts import ROOT, wait_until


def folder_of(stack: Stack) -> Path:
    """Return the data folder of a stack's server."""
    return data_folder(StackSettings(TWODOOR_HOME=stack.home))  # type: ignore[call-arg]


def rows(stack: Stack) -> list[int]:
    """Return what was written with ``write``."""
    with psycopg.connect(stack.database_url, connect_timeout=5) as connection:
        return [row[0] for row in connection.execute("SELECT number FROM written ORDER BY number")]


def write(stack: Stack, number: int) -> None:
    """Write one number and commit."""
    with psycopg.connect(stack.database_url, connect_timeout=5) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS written (number int)")
        connection.execute("INSERT INTO written VALUES (%s)", [number])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """PostgreSQL alone, in the state folder of an older version that had none, after a first start that was cut short."""
    home = tmp_path_factory.mktemp("old") / "home"
    folder, me = StateFolder(home), identify(os.getpid())
    assert me is not None
    folder.create()
    folder.write(StackRecord(me, "stopped", [ServiceRecord("kafka", "127.0.0.1:9092")]))
    (home / "postgres" / "data").mkdir(parents=True)
    (home / "postgres" / "data" / "PG_VERSION").write_text("18\n")
    with Stack(home, ("postgres",)) as running:
        yield running


def test_it_is_up_with_the_ledgers_schema(stack: Stack) -> None:
    assert stack.status()["postgres"].state == "ready"
    with psycopg.connect(stack.database_url) as connection:
        schemas = [row[0] for row in connection.execute("SELECT nspname FROM pg_namespace")]
        super_user = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    assert "twodoor" in schemas
    assert super_user == (False,)


def test_only_the_password_opens_it_and_nothing_shows_the_password(stack: Stack) -> None:
    password = (stack.home / "postgres" / "password").read_text()
    assert (stack.home / "postgres" / "password").stat().st_mode & 0o077 == 0
    assert password in stack.database_url
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(stack.database_url.replace(password, "wrong"))
    shown = subprocess.run(
        [sys.executable, "-m", "local_stack", "status"],
        env={**os.environ, **stack.environment}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert json.loads(shown)["services"][0]["state"] == "ready"
    kept = [stack.log_path(name).read_text() for name in ("postgres", "supervisor")]
    lines = [" ".join(command_line(pid)) for pid in (stack.pid("postgres"), stack.supervisor_pid)]
    assert not [text for text in (shown, *kept, *lines, json.dumps(stack.status(), default=str)) if password in text]


def test_each_of_its_processes_gives_way_in_its_own_session_too(stack: Stack) -> None:
    if not Path("/proc/self/autogroup").exists():
        return  # this kernel has no groups by session: the nice value alone counts

    def nice_of_sessions() -> set[str]:
        found = children(stack.pid("postgres"))
        return {Path(f"/proc/{pid}/autogroup").read_text().split("nice ")[1].strip() for pid in found}

    wait_until(lambda: nice_of_sessions() == {"5"}, "every session has the nice value", timeout_s=10)


def test_a_killed_server_is_back_at_once_with_all_that_was_committed(stack: Stack) -> None:
    write(stack, 1)
    old = stack.pid("postgres")
    with psycopg.connect(stack.database_url) as connection:
        connection.execute("SELECT 1")
        os.kill(old, signal.SIGKILL)
        stack.wait_ready("postgres", timeout_s=20, other_than=old)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert rows(stack) == [1]
    assert any("postgres was killed by SIGKILL; starting it again in 0.2 s" in line for line in stack.lines())


def test_it_ends_at_once_although_somebody_is_connected_and_keeps_what_it_has(stack: Stack) -> None:
    with psycopg.connect(stack.database_url):
        stack.stop_service("postgres")
    assert list(processes(folder_of(stack))) == []
    stack.start_service("postgres")
    assert rows(stack) == [1]


def test_after_the_death_of_everything_the_next_up_works_whatever_the_old_pid_means_now(stack: Stack) -> None:
    pid_file = folder_of(stack) / "postmaster.pid"
    # Read before: a server that hears of its supervisor's death in time ends in order, and then takes the file away.
    lines = pid_file.read_text().splitlines()
    stack.kill()
    wait_until(lambda: not list(processes(folder_of(stack))), "every process of the server is gone")
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    stack.start()
    assert rows(stack) == [1]


def test_two_stacks_side_by_side_do_not_meet(stack: Stack, tmp_path: Path) -> None:
    with Stack(tmp_path / "home", ("postgres",)) as other:
        write(other, 2)
        assert (rows(other), rows(stack)) == ([2], [1])
        mine = other.database_url.split("@")[0]
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(stack.database_url.replace(stack.database_url.split("@")[0], mine))
    assert list(processes(folder_of(other))) == []
    assert rows(stack) == [1]


def test_down_leaves_no_process_and_the_next_up_has_the_data(stack: Stack) -> None:
    stack.stop()
    assert list(processes(folder_of(stack))) == []
    stack.start()
    assert rows(stack) == [1]
