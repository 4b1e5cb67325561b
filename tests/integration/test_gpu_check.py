"""The prepared GPU check without a GPU: everything but the GPU itself, with the real Triton and gateway."""

import subprocess
import sys

import pytest

from tests.parts import ROOT


@pytest.mark.timeout(240)
def test_the_dry_run_of_the_gpu_check_finds_nothing_wrong() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith("gpu check: dry run: ok, ")
