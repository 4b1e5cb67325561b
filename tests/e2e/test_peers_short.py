"""The comparison with other servers in its short form, with the peer that needs no environment of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(180)
def test_a_plain_peer_is_measured_with_right_answers_and_leaves_json_and_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--short", "--force", "--only", "fastapi-async"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("peers: ok, ")
    (arm,) = json.loads((tmp_path / "peers.json").read_text())["arms"]
    assert (arm["name"], arm["errors"]) == ("fastapi-async", [])
    assert all(figures["per_s"][0] > 0 and figures["wrong"] == [0] for figures in arm["callers"].values())
    assert arm["mix"]["bulk_p50_ms"] > 0
    assert arm["mix"]["bulk_rows_per_s_shared"] > 0
    assert "| FastAPI + ONNX Runtime, async |" in (tmp_path / "peers.md").read_text()
