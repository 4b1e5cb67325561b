"""The command line without any service: help, wrong usage, exit codes, a missing extra."""

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.parts import ROOT
from twodoor.cli import app
from twodoor.commands.models import pinned_versions
from twodoor.config import ClientConfig

run = CliRunner()

COMMANDS = (
    "up", "down", "status", "logs", "demo", "migrate", "predict", "stream", "submit", "jobs", "bulk", "models", "produce",
    "consume", "dlq", "bench",
)  # fmt: skip


def test_help_names_every_command() -> None:
    result = run.invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.output


def test_no_command_is_registered_twice() -> None:
    names = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
    assert sorted(map(str, names)) == sorted(COMMANDS)


def test_up_names_every_part_it_starts() -> None:
    said = " ".join(run.invoke(app, ["up", "--help"]).output.split())
    assert "Start PostgreSQL, Kafka, Triton, the gateway and the consumer" in said


def test_help_is_fast_because_nothing_heavy_is_loaded() -> None:
    code = "import sys; sys.argv = ['twodoor', '--help']\ntry:\n import twodoor.cli; twodoor.cli.main()\nexcept SystemExit: pass\n"
    code += "bad = {'httpx', 'aiokafka', 'psycopg', 'numpy', 'transformers', 'pydantic', 'serving', 'jobs', 'local_stack'} & set(sys.modules)\n"
    code += "assert not bad, bad"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30, cwd=ROOT)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_of_its_own(name: str) -> None:
    if name == "bench":
        return  # its arguments, --help too, are those of the benchmarks
    assert run.invoke(app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict"],
        ["predict", "x", "--timeout-s", "0"],
        ["nonsense"],
        ["produce", "no-such-file.jsonl"],
        ["produce", str(ROOT)],
        ["consume", "--max", "0"],
        ["models", "build", "--precision", "int4"],
        ["models", "add", "x", "--onnx", "no-such.onnx", "--tokenizer", ".", "--task", "classify"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    assert run.invoke(app, arguments).exit_code == 2


def test_a_wrong_address_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWODOOR_CLIENT_URL", "localhost:8080")
    result = run.invoke(app, ["predict", "x"])
    assert result.exit_code == 2
    assert "no http:// or https:// address" in result.stderr


def test_a_wrong_port_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWODOOR_GATEWAY_PORT", "http")
    result = run.invoke(app, ["predict", "x"])
    assert result.exit_code == 2
    assert "http://127.0.0.1:http" in result.stderr


def test_logs_follow_goes_on_after_the_log_was_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "logs").mkdir(parents=True)
    log = home / "logs" / "kafka.log"
    log.write_text("an old line, longer than what follows\n")
    command = [sys.executable, "-m", "twodoor", "logs", "kafka", "-f"]
    with subprocess.Popen(
        command, env={**os.environ, "TWODOOR_HOME": str(home)}, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "an old line, longer than what follows\n"
        with log.open("r+") as handle:
            handle.truncate()
        with log.open("a") as handle:
            handle.write("new\n")
        timer = threading.Timer(10, reader.kill)
        timer.start()
        assert reader.stdout.readline() == "new\n"
        timer.cancel()
        reader.kill()


def test_a_setting_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWODOOR_KAFKA_MAX_MESSAGE_BYTES", "1 MB")
    result = run.invoke(app, ["consume"])
    assert result.exit_code == 2
    assert "TWODOOR_KAFKA_MAX_MESSAGE_BYTES is '1 MB'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "variable", "value"),
    [
        (["predict", "x"], "TWODOOR_CLIENT_URL", "http://127.0.0.1:1"),
        (["consume", "--timeout-s", "1"], "TWODOOR_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1"),
        (["dlq", "list"], "TWODOOR_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1"),
        (["dlq", "replay"], "TWODOOR_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1"),
        (["produce", "pyproject.toml"], "TWODOOR_KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1"),
    ],
)
def test_a_service_that_is_away_exits_3_with_one_clear_line(arguments: list[str], variable: str, value: str) -> None:
    env = {"PATH": "", variable: value, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "twodoor", *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT, env=env
    )
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert value.removeprefix("http://") in done.stderr


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (["up"], "local_stack", "server,local"),
        (["status", "--json"], "psutil", "server,local"),
        (["models", "list"], "model_builder", "server,local"),
        (["consume"], "aiokafka", "server"),
        (["dlq", "list"], "aiokafka", "server"),
        (["produce", "pyproject.toml"], "aiokafka", "server"),
        (["demo"], "aiokafka", "server,local"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(arguments: list[str], module: str, extra: str) -> None:
    # What a light installation lacks is taken away from a full one.
    code = (
        "import sys, importlib.abc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = ['twodoor', *{arguments!r}]\n"
        "import twodoor.cli; twodoor.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert f"pip install '.[{extra}]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_bench_outside_a_checkout_says_where_the_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twodoor.commands import bench

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "twodoor" / "commands" / "bench.py"))
    result = run.invoke(app, ["bench"])
    assert result.exit_code == 2
    assert "make bench" in result.stderr


def test_control_characters_of_a_text_do_not_reach_the_terminal() -> None:
    from twodoor.console import plain, shorten

    assert "\x1b" not in plain("\x1b[31mred")
    assert shorten("x" * 100, 10) == "x" * 9 + "…"
    assert len(shorten("\x00" * 100, 10)) == 10


@pytest.mark.parametrize(
    ("content", "known"),
    [
        (b'{"code": "not_found"}', True),
        (b"<h1>Not Found</h1>", False),
        (b'{"detail": "Not Found"}', False),
        (b"[]", False),
    ],
)
def test_only_a_gateway_without_jobs_says_that_no_version_is_pinned(content: bytes, known: bool) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = ClientConfig.from_environ({"TWODOOR_CLIENT_URL": f"http://127.0.0.1:{server.server_port}"})
        assert pinned_versions(config, "m") == (frozenset() if known else None)
        server.shutdown()
