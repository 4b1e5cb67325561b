"""`submit`, `jobs` and `bulk` against a small job API on a real socket: what is printed, exit codes, Ctrl-C."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.parts import ROOT, wait_until
from tests.unit.job_server import BROKEN, JobServer, result_lines, serving
from twodoor.cli import app

run = CliRunner()
FIRST = f"job_{1:032x}"
ROWS = '"fine"\n{"id": "r2", "text": "a bore"}\n'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobServer]:
    with serving() as state:
        monkeypatch.setenv("TWODOOR_CLIENT_URL", state.url)
        yield state


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(ROWS)
    return file


def twodoor(*arguments: object, stdin: str | None = None) -> Result:
    return run.invoke(app, [str(argument) for argument in arguments], input=stdin)


def test_submit_prints_the_id_alone_so_that_a_shell_can_keep_it(server: JobServer, rows: Path) -> None:
    done = twodoor("submit", rows, "--model", "m2", "--truncate", "--metadata", "who=me=you", "--metadata", "x=")
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{FIRST}\n", "")
    (asked,) = server.asked
    assert asked.body.decode() == ROWS
    assert (asked.query["model"], asked.query["truncate"]) == ("m2", "true")
    assert json.loads(asked.query["metadata"]) == {"who": "me=you", "x": ""}


def test_submit_reads_a_pipe_and_sends_gzip(server: JobServer, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "twodoor", "submit", "-", "--gzip", "--json", "--idempotency-key", "k"]
    done = subprocess.run(command, input=ROWS, capture_output=True, text=True, timeout=30, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["id"] == FIRST
    assert server.asked[0].body.decode() == ROWS
    assert server.asked[0].headers["content-encoding"] == "gzip"
    assert server.asked[0].headers["idempotency-key"] == "k"
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(b'"x"\n'))
    assert twodoor("submit", packed).exit_code == 0
    assert server.asked[1].body == b'"x"\n'


def test_submit_wait_tells_how_it_ended_and_row_errors_do_not_fail_it(server: JobServer, rows: Path) -> None:
    server.keys["k"] = server.add(1, "completed", rows=30, failed=10)["id"]
    done = twodoor("submit", rows, "--wait", "--idempotency-key", "k")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{FIRST} completed: 30 rows, 20 succeeded, 10 failed in 2.0 s, 15 rows/s")
    assert f"10 rows have no answer: twodoor jobs results {FIRST} --only-errors" in done.stderr


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_a_job_that_did_not_complete_exits_1_and_its_results_are_written_all_the_same(
    server: JobServer, rows: Path, tmp_path: Path, status: str
) -> None:
    error = {"error": {"code": "input_lost", "message": "gone\x1b[31m"}} if status == "failed" else {}
    server.keys["k"] = server.add(1, status, rows=3, failed=3, **error)["id"]
    server.results = result_lines(3)
    out = tmp_path / "out.jsonl"
    done = twodoor("submit", rows, "--output", out, "--idempotency-key", "k")
    assert done.exit_code == 1
    assert f"{FIRST} {status}: 3 rows" in done.stdout
    assert out.read_bytes() == server.results
    assert "\x1b" not in done.output
    assert ("input_lost: gone" in done.stdout) == (status == "failed")


def test_a_wait_that_is_over_before_the_job_exits_1_and_says_how_to_come_back(server: JobServer, rows: Path) -> None:
    done = twodoor("submit", rows, "--wait", "--timeout-s", "0.2")
    assert done.exit_code == 1
    assert "still queued" in done.stderr
    assert f"twodoor jobs show {FIRST} --wait" in done.stderr


def test_ctrl_c_while_waiting_leaves_the_job_running_and_says_how_to_come_back(server: JobServer, rows: Path) -> None:
    command = [sys.executable, "-m", "twodoor", "submit", str(rows), "--wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as waiting:
        wait_until(lambda: server.count("GET", f"/v1/jobs/{FIRST}") > 0, "it waits")
        waiting.send_signal(signal.SIGINT)
        _, stderr = waiting.communicate(timeout=10)
    assert waiting.returncode == 1
    assert "the job goes on" in stderr
    assert f"twodoor jobs show {FIRST} --wait" in stderr
    assert "Traceback" not in stderr
    assert server.count("POST", f"/v1/jobs/{FIRST}/cancel") == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit"],
        ["submit", "no-such-file.jsonl"],
        ["submit", str(ROOT)],
        ["submit", "pyproject.toml", "--metadata", "novalue"],
        ["submit", "pyproject.toml", "--output", "no/such/folder/out"],
        ["submit", "pyproject.toml", "--output", "docs"],
        ["submit", "pyproject.toml", "--completion-window-s", "0"],
        ["submit", "pyproject.toml", "--idempotency-key", "clé"],
        ["jobs"],
        ["jobs", "show"],
        ["jobs", "show", ".."],
        ["jobs", "list", "--status", "done"],
        ["bulk", "stop"],
    ],
)
def test_wrong_usage_exits_2_and_asks_nobody(
    server: JobServer, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert twodoor(*arguments).exit_code == 2
    assert server.asked == []


@pytest.mark.parametrize(
    "arguments",
    [["submit", "pyproject.toml"], ["jobs", "list"], ["jobs", "results", FIRST], ["bulk", "status"]],
    ids=lambda arguments: arguments[0],
)
def test_a_gateway_that_is_away_exits_3_with_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TWODOOR_CLIENT_URL", "http://127.0.0.1:1")
    done = twodoor(*arguments)
    assert done.exit_code == 3
    assert len(done.stderr.splitlines()) == 1
    assert "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("status", [401, 403, 404, 409, 422, 429, 503])
def test_what_the_server_refuses_exits_1_with_its_code(server: JobServer, status: int) -> None:
    server.failures = [(status, "some_code\x1b[2J")] * 9
    done = twodoor("jobs", "cancel", FIRST)
    assert done.exit_code == 1
    assert "some_code" in done.stderr
    assert "\x1b" not in done.stderr


def test_list_shows_the_newest_and_json_is_one_job_a_line(server: JobServer) -> None:
    assert twodoor("jobs", "list").stdout == "no jobs\n"
    for number in range(120):
        server.add(number, "completed" if number % 2 else "running", model="m\x1b[31m")
    assert len(twodoor("jobs", "list").stdout.splitlines()) == 50
    done = twodoor("jobs", "list", "--max", "110", "--json")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == list(server.jobs)[:110]
    done = twodoor("jobs", "list", "--status", "completed", "--max", "1")
    assert done.stdout.startswith(f"{FIRST}  completed")
    assert "\x1b" not in done.stdout


def test_show_prints_every_member_and_waits_when_asked(server: JobServer) -> None:
    job = server.add(1, "running", metadata={"note": "\x1b]0;evil\x07"})
    done = twodoor("jobs", "show", FIRST)
    assert done.exit_code == 0
    assert "status         running" in done.stdout
    assert "total 3, succeeded 0" in done.stdout
    assert "\x1b" not in done.stdout
    assert json.loads(twodoor("jobs", "show", FIRST, "--json").stdout) == job
    server.steps = ["running", "cancelled"]
    done = twodoor("jobs", "show", FIRST, "--wait", "--json")
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (1, "cancelled")


def test_cancel_and_delete(server: JobServer) -> None:
    server.add(1, "running")
    assert "cancelling" in twodoor("jobs", "cancel", FIRST).stdout
    done = twodoor("jobs", "delete", FIRST)
    assert (done.exit_code, done.output) == (0, "")
    done = twodoor("jobs", "delete", FIRST, "--json")
    assert done.exit_code == 1
    assert "not_found" in done.stderr


def test_results_are_json_lines_that_no_row_can_break_out_of(server: JobServer, tmp_path: Path) -> None:
    server.add(1, "completed")
    odd = {"index": 3, "id": "\x1b[31m\u2028\x9b\U0001f642", "error": {"code": "c", "message": "\x07"}}
    server.results = result_lines(3) + json.dumps(odd, ensure_ascii=False).encode() + b"\n"
    done = twodoor("jobs", "results", FIRST)
    assert done.exit_code == 0
    assert done.stdout_bytes.isascii()
    assert b"\x1b" not in done.stdout_bytes
    assert [json.loads(line) for line in done.stdout.split("\n")[:-1]] == [
        json.loads(line) for line in server.results.decode().split("\n")[:-1]
    ]
    done = twodoor("jobs", "results", FIRST, "--only-errors", "--partial")
    assert [json.loads(line)["index"] for line in done.stdout.splitlines()] == [2, 3]
    assert server.asked[-1].query == {"only": "errors", "partial": "true"}
    out = tmp_path / "out.jsonl"
    done = twodoor("jobs", "results", FIRST, "--output", out, "--json")
    assert json.loads(done.stdout) == {"id": FIRST, "output": str(out), "bytes": len(server.results)}
    assert out.read_bytes() == server.results
    assert twodoor("jobs", "results", FIRST, "-o", tmp_path / "no" / "folder").exit_code == 1


def test_results_before_the_end_say_what_to_do(server: JobServer) -> None:
    server.add(1, "running")
    server.failures = [(409, "job_not_ended")]
    done = twodoor("jobs", "results", FIRST)
    assert done.exit_code == 1
    assert "--partial" in done.stderr
    assert "--wait" in done.stderr


def test_a_submission_without_an_answer_tells_the_key_that_makes_no_second_job(server: JobServer, rows: Path) -> None:
    server.failures = [(BROKEN, "")] * 3
    done = twodoor("submit", rows)
    assert done.exit_code == 3
    (key,) = server.keys
    assert f"--idempotency-key {key}" in done.stderr
    done = twodoor("submit", rows, "--idempotency-key", key)
    assert (done.exit_code, done.stdout) == (0, f"{FIRST}\n")
    assert len(server.jobs) == 1


def test_bulk_pause_waits_until_paused_and_says_so_when_it_is_not_in_time(server: JobServer) -> None:
    server.bulk = ["pausing", "paused"]
    done = twodoor("bulk", "pause", "--wait")
    assert done.exit_code == 0
    assert done.stdout.startswith("paused\n")
    assert "rows_in_flight 2" in done.stdout
    assert "\x1b" not in done.stdout
    done = twodoor("bulk", "resume", "--wait", "--timeout-s", "0.2")
    assert done.exit_code == 1
    assert "still paused" in done.stderr
    status: dict[str, Any] = json.loads(twodoor("bulk", "status", "--json").stdout)
    assert status["state"] == "paused"
    assert status["consumers"][0]["rows_in_flight"] == 2
