"""The benchmark report in its short form: it runs on the real stack, every answer is right, and its files are there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.plan import SECTIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(420)
def test_the_short_report_runs_with_right_answers_and_leaves_json_table_and_pictures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--short", "--force", "--output", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("bench: ok, ")
    content = json.loads((tmp_path / "report.json").read_text())
    sections = {section["name"]: section for section in content["sections"]}
    assert tuple(sections) == SECTIONS
    assert not [error for section in sections.values() for error in section["errors"]]
    for name in SECTIONS[1:]:
        assert sections[name]["figures"], name
        # In so short a time a machine that is busy may get no row through: a ratio then has no number.
        assert all(f["unit"] == "ratio" or f["median"] is not None for f in sections[name]["figures"]), name
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    # Where perf_analyzer cannot be had the report says so in a line; with it there are figures.
    perf = sections["perf"]
    assert perf["figures"] or perf["notes"][-1].startswith("not measured: ")
    table = (tmp_path / "report.md").read_text()
    assert "| 32 callers: gateway ÷ Triton direct, requests/s |" in table
    assert "| topic ÷ best plain loop, rows/s |" in table
    assert "| job ÷ topic, rows/s |" in table
    for rate in (6, 20):
        assert f"| {rate} calls/s: p50 beside the topic ÷ alone |" in table
    assert "| models x 2: memory of each |" in table
