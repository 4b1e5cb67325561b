"""`up`, `status`, `logs`, `down` and `demo` as a user types them, with the real parts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_stack import Stack
from tests.parts import ROOT, remove, wait_until
from tests.stubs import write_repository

pytestmark = pytest.mark.timeout(300)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "twodoor", *arguments]


def twodoor(env: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
        env={**os.environ, **env},
    )  # fmt: skip


def processes_of(folder: Path) -> list[int]:
    """Return the processes whose command line or environment names a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            known = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked
        if str(folder).encode() in known:
            found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A repository with the one model the demo needs: it starts in a fraction of the time."""
    folder = write_repository(tmp_path_factory.mktemp("repository"), ("sentiment_model",), ())
    yield folder
    remove(folder)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[dict[str, str]]:
    """A stack that `twodoor up --detach` started, on ports of its own."""
    environment = Stack(tmp_path_factory.mktemp("cli-stack"), repository=repository).environment
    up = twodoor(environment, "up", "--detach", "--consumers", "2")
    assert up.returncode == 0, up.stdout + up.stderr
    yield environment
    down = twodoor(environment, "down")
    assert down.returncode == 0, down.stdout + down.stderr
    assert processes_of(Path(environment["TWODOOR_HOME"])) == []


def test_status_names_every_part_for_people_and_for_programs(env: dict[str, str]) -> None:
    done = twodoor(env, "status", "--json")
    assert done.returncode == 0
    services = json.loads(done.stdout)["services"]
    assert {service["name"] for service in services} == {
        "postgres",
        "kafka",
        "triton",
        "gateway",
        "consumer",
        "consumer-2",
    }
    assert all(service["state"] == "ready" and service["pid"] and service["address"] for service in services)
    assert len(twodoor(env, "status").stdout.splitlines()) == 6


def test_logs_shows_a_parts_log_and_refuses_a_name_that_is_none(env: dict[str, str]) -> None:
    shown = twodoor(env, "logs", "gateway", "--lines", "1")
    assert shown.returncode == 0
    assert len(shown.stdout.splitlines()) == 1
    unknown = twodoor(env, "logs", "nonsense")
    assert unknown.returncode == 2
    assert "nonsense" in unknown.stderr


def test_a_second_up_says_that_the_stack_runs(env: dict[str, str]) -> None:
    second = twodoor(env, "up", "--detach")
    assert second.returncode == 1
    assert "runs already" in second.stdout + second.stderr


def test_a_file_goes_through_the_topic_and_its_dead_letter_can_be_replayed(env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"id": "1", "text": "A wonderful evening."}\n{"id": "2", "text": ""}\n')
    assert twodoor(env, "produce", str(file)).returncode == 0
    done = twodoor(env, "consume", "--from-beginning", "--max", "2", "--timeout-s", "60", "--json")
    assert done.returncode == 0, done.stderr
    results = {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert results["1"]["output"]["label"] == "positive"
    assert results["2"]["error"]["code"] == "empty_text"

    file.write_text('{"broken\n')
    assert twodoor(env, "produce", str(file), "--raw").returncode == 0
    letters: list[str] = []

    def listed() -> bool:
        letters[:] = twodoor(env, "dlq", "list", "--json").stdout.splitlines()
        return bool(letters)

    wait_until(listed, "the dead letter is listed", timeout_s=60)
    assert json.loads(letters[0])["code"] == "invalid_json"
    assert json.loads(twodoor(env, "dlq", "replay", "--json").stdout)["records"] == 1
    # It cannot be read this time either: a new dead letter, and the old one is done with.
    wait_until(lambda: listed() and len(letters) == 1, "the letter comes back as a new one", timeout_s=60)


def test_the_demo_ends_with_ok_and_leaves_nothing_behind(tmp_path: Path, repository: Path) -> None:
    env = {"TMPDIR": str(tmp_path), "TWODOOR_MODELS_REPOSITORY": str(repository)}
    done = twodoor(env, "demo", "--rows", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("demo: ok 350 records and a job of 350 rows answered exactly once")
    assert list(tmp_path.iterdir()) == []
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(("sent", "moment"), [(signal.SIGINT, "starting"), (signal.SIGTERM, "calls alone")])
def test_a_demo_that_is_stopped_leaves_nothing_behind(
    tmp_path: Path, repository: Path, sent: signal.Signals, moment: str
) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "TWODOOR_MODELS_REPOSITORY": str(repository), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command("demo", "--rows", "300"), stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if moment in line:
                break
        if moment == "starting":
            wait_until(lambda: len(processes_of(tmp_path)) > 1, "the stack's processes are there")
        demo.send_signal(sent)
        assert demo.wait(60) == 1
        assert demo.stdout.read().splitlines()[-1] == "demo: stopped; nothing was left running"
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: processes_of(tmp_path) == [], "nothing is left running", timeout_s=10)
