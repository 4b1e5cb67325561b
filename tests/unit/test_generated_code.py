"""Generated files are what their sources give today."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_wire_forms_are_what_the_proto_files_give(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        "proto",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
    ]
    subprocess.run([*command, "serving/v1/bulk.proto"], cwd=ROOT, check=True, timeout=60)
    for name in ("bulk_pb2.py", "bulk_pb2.pyi"):
        assert (tmp_path / "serving/v1" / name).read_text() == (ROOT / "serving/v1" / name).read_text(), (
            f"serving/v1/{name} is old: run make proto"
        )


@pytest.mark.parametrize("lock", ["cpu.lock", "server.lock", "triton.lock"])
def test_a_lock_pins_hashes_and_holds_no_address(lock: str) -> None:
    text = (ROOT / "requirements" / lock).read_text()
    assert "--hash=sha256:" in text
    assert "://" not in text
    assert "--find-links" not in text
    assert "--index-url" not in text


def test_torch_stays_out_of_the_locks() -> None:
    for lock in (ROOT / "requirements").glob("*.lock"):
        names = [line.split("==")[0] for line in lock.read_text().splitlines() if "==" in line]
        assert "torch" not in names
