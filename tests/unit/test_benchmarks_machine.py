"""A busy machine is told from a quiet one: whose CPU it is, and that the report refuses to start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import machine, run
from serving.errors import ConfigError

# It ends by itself, should the test be killed.
SPIN = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@contextmanager
def another_program() -> Iterator[int]:
    """Run a program that keeps a core busy and is no child of ours, as somebody else's would be."""
    nothing = "stdin=-3, stdout=-3, stderr=-3"  # subprocess.DEVNULL
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SPIN!r}], {nothing}).pid)"
    pid = int(subprocess.run([sys.executable, "-c", start], capture_output=True, check=True, timeout=30).stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def until_it_worked(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + 30
    since_s = cpu_s(pid)
    while cpu_s(pid) - since_s < seconds:
        assert time.monotonic() < deadline, "the other program got no CPU"
        time.sleep(0.01)


def test_the_watch_counts_our_own_work_as_ours() -> None:
    watch = machine.CpuWatch(lambda: ())
    before = watch.read()
    sum(n * n for n in range(2_000_000))
    after = watch.read()
    assert after.ours_s - before.ours_s > 0.02
    assert 0 <= watch.others_share(before, after) <= 1


def test_the_watch_records_the_cpu_of_a_program_that_is_not_ours() -> None:
    with another_program() as pid:
        theirs, with_it = machine.CpuWatch(lambda: ()), machine.CpuWatch(lambda: (pid,))
        begins = theirs.read(), with_it.read()
        until_it_worked(pid, 0.4)
        ends = theirs.read(), with_it.read()
    seconds = ends[0].at_s - begins[0].at_s
    cores = os.cpu_count() or 1
    assert theirs.others_share(begins[0], ends[0]) * seconds * cores > 0.35
    assert ends[1].ours_s - begins[1].ours_s > 0.35


def test_a_busy_machine_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(_url: str | None) -> None:
        raise AssertionError("a stack was started")

    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    monkeypatch.setattr(run, "_stack", never)
    monkeypatch.setattr(machine, "BUSY_SHARE", 0.02)
    with another_program() as pid:
        until_it_worked(pid, 0.1)
        assert run.main() == 1
    assert "the machine is busy" in capsys.readouterr().err


@pytest.mark.parametrize(("share", "arguments"), [(0.01, []), (0.9, ["--force"])])
def test_a_quiet_machine_is_measured_and_a_busy_one_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], share: float, arguments: list[str]
) -> None:
    def begun(_url: str | None) -> None:
        raise ConfigError("the stack is being started")

    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    monkeypatch.setattr(run, "_stack", begun)
    monkeypatch.setattr(machine, "load_before", lambda: {"load_1min": 0.1, "cpu_share": share})
    assert run.main() == 1
    assert capsys.readouterr().err == "benchmarks: the stack is being started\n"


def test_memory_and_cpu_time_are_those_of_a_whole_tree() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "data = bytes(bytearray(b'x') * 50_000_000); print(1, flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        assert machine.tree_memory_bytes([child.pid]) > 50_000_000
        assert machine.tree_memory_bytes([os.getpid()]) > machine.tree_memory_bytes([child.pid])
        assert machine.tree_cpu_s([child.pid]) > 0
        child.communicate(b"\n")
