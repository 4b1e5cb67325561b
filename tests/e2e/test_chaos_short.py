"""The chaos run in its short form: a few rounds of kills, stops and store faults break no invariant."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = "4"


@pytest.mark.timeout(420)
async def test_a_few_rounds_of_faults_break_no_invariant() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--short", "--rounds", ROUNDS]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=400
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert done.stdout.splitlines()[-1].startswith("chaos: ok ")
