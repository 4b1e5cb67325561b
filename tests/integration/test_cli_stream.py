"""`twodoor stream` against the real gateway."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.parts import ROOT, Gateway
from tests.stubs import STUB, stub_score
from twodoor.cli import app


@pytest.fixture
def stream(gateway_process: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("TWODOOR_CLIENT_URL", gateway_process.url)

    def run(content: bytes, *options: str) -> Result:
        file = tmp_path / "lines"
        file.write_bytes(content)
        return CliRunner().invoke(app, ["stream", str(file), "--model", STUB, *options])

    return run


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_line_gets_its_answer_and_a_bad_one_its_error(stream: Any) -> None:
    content = b'\xef\xbb\xbfplain text\r\n"a \\u00fc string"\n\n{"id": "x", "text": "an object"}\n{"broken\n[1]\n\xff\n{"text": 1}\nlast'
    result = stream(content, "--in-order")
    assert result.exit_code == 1
    assert "3 lines have no answer" in result.stderr
    told = lines(result)
    assert [line["line"] for line in told] == [1, 2, 4, 5, 6, 7, 8, 9]
    assert told[2]["id"] == "x"
    assert [line["error"]["code"] for line in told if "error" in line] == ["invalid_row"] * 3
    for line, text in ((told[0], "plain text"), (told[1], "a \u00fc string"), (told[4], "[1]"), (told[7], "last")):
        assert line["output"]["score"] == pytest.approx(stub_score(text), abs=1e-3)


def test_many_lines_are_answered_each_once(stream: Any) -> None:
    result = stream(b"".join(b"line %d\n" % number for number in range(1, 101)), "--window", "16")
    assert result.exit_code == 0
    assert sorted(line["line"] for line in lines(result)) == list(range(1, 101))


def test_an_answer_comes_while_the_next_line_is_waited_for_and_ctrl_c_ends_cleanly(gateway_process: Gateway) -> None:
    command = [sys.executable, "-m", "twodoor", "stream", "--model", STUB]
    env = {**os.environ, "TWODOOR_CLIENT_URL": gateway_process.url}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=env
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdin.write(b"hello\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["line"] == 1
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 1
        assert child.stderr.read().decode() == "twodoor: stopped; 0 lines that were sent have no answer\n"


def test_nobody_there_and_a_file_that_is_not_there_have_exit_codes_of_their_own(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(app, ["stream", "no-such-file"]).exit_code == 2
    monkeypatch.setenv("TWODOOR_CLIENT_URL", "http://127.0.0.1:1")
    result = stream(b"a\n")
    assert result.exit_code == 3
    assert "twodoor up" in result.stderr


def test_a_reader_who_leaves_ends_the_command_without_a_word(gateway_process: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"a line\n" * 100)
    command = [sys.executable, "-m", "twodoor", "stream", str(file), "--model", STUB]
    env = {**os.environ, "TWODOOR_CLIENT_URL": gateway_process.url}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=env) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.wait(20) == 1
        assert child.stderr.read().decode() == ""


def test_a_line_that_is_too_large_as_a_message_is_an_error_of_its_own(stream: Any) -> None:
    result = stream(b"first\n" + b"\\" * 600_000 + b"\n" + b"a" * 2**20 + b"\nlast\n", "--in-order")
    told = lines(result)
    assert [line["line"] for line in told] == [1, 2, 3, 4]
    assert [line.get("error", {}).get("code") for line in told] == [None, "invalid_row", "invalid_row", None]


def test_ctrl_c_ends_also_where_a_pipe_by_name_says_nothing(gateway_process: Gateway, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "twodoor", "stream", str(pipe), "--model", STUB]
    env = {**os.environ, "TWODOOR_CLIENT_URL": gateway_process.url}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=env) as child:
        assert child.stdout is not None
        with pipe.open("wb", buffering=0) as writer:
            writer.write(b"hello\n")
            assert json.loads(child.stdout.readline())["line"] == 1
            child.send_signal(signal.SIGINT)
            assert child.wait(20) == 1
