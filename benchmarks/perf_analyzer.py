"""Triton's own perf_analyzer: fetched by hash, fed with real token ids (random ones crash the model)."""

import csv
import ctypes.util
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stats import IdArray

LOCK = Path(__file__).resolve().parents[1] / "requirements" / "perf.lock"
FETCH_TIMEOUT_S = 180.0
# A wheel's file → its name in the cache.
WANTED = {"perf_analyzer": "perf_analyzer", "libcudart.so.12": "libcudart.so.12"}
LIBB64 = "libb64.so.0d"


class NotAvailable(Exception):
    """Raised when perf_analyzer cannot be had on this machine; says why in one line."""


@dataclass(frozen=True, slots=True)
class PerfRow:
    """What perf_analyzer measured with one number of callers; times in ms."""

    callers: int
    per_s: float
    p50_ms: float
    p99_ms: float
    queue_ms: float
    compute_ms: float


def fetch(cache: Path, triton_venv: Path) -> Path:
    """Return the binary in ``cache``, fetching it first where it is not there yet; raises NotAvailable."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NotAvailable("its binary is for Linux on x86-64")
    binary = cache / "perf_analyzer"
    if not all((cache / name).is_file() for name in WANTED.values()):
        _download(cache)
    _link_libb64(cache, triton_venv)
    done = _run([str(binary), "--version"], cache, 20.0)
    if done.returncode != 0:
        raise NotAvailable(f"its binary does not run here: {_last_line(done.stdout + done.stderr)}")
    return binary


def _download(cache: Path) -> None:
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(LOCK), "--dest", str(wheels)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NotAvailable(f"it could not be fetched: {_last_line(done.stderr)}")
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if (target := WANTED.get(name.rpartition("/")[2])) is not None:
                    _extract(archive, name, cache / target)
    shutil.rmtree(wheels)


def _extract(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    """Write the file whole or not at all."""
    temporary = target.with_suffix(".part")
    temporary.write_bytes(archive.read(name))
    temporary.chmod(0o755)
    temporary.replace(target)


def _link_libb64(cache: Path, triton_venv: Path) -> None:
    """The system's libb64 serves, else the copy that Triton's own package carries."""
    if (cache / LIBB64).exists() or ctypes.util.find_library("b64"):
        return
    carried = sorted(triton_venv.absolute().glob("lib/python*/site-packages/nvidia_pytriton.libs/libb64-*"))
    if not carried:
        raise NotAvailable("the library libb64 is missing (Debian, Ubuntu: apt-get install libb64-0d)")
    (cache / LIBB64).unlink(missing_ok=True)
    (cache / LIBB64).symlink_to(carried[0])


def write_input(rows: Sequence[Mapping[str, IdArray]], file: Path) -> tuple[int, int]:
    """Write real rows of the commonest padded length; returns that length and how many rows have it."""
    lengths = Counter(row["input_ids"].shape[1] for row in rows)
    length = max(lengths, key=lambda value: (lengths[value], -value))
    chosen = [row for row in rows if row["input_ids"].shape[1] == length]
    data = [{name: {"content": array[0].tolist(), "shape": [length]} for name, array in row.items()} for row in chosen]
    file.write_text(json.dumps({"data": data}))
    return length, len(chosen)


def measure(
    binary: Path, address: str, model: str, file: Path, shape: Mapping[str, int], callers: int, window_ms: int
) -> PerfRow:
    """Run it with one number of callers, one row a call; raises NotAvailable where it gives no figure."""
    table = file.with_suffix(".csv")
    table.unlink(missing_ok=True)
    command = [
        str(binary),
        "-m",
        model,
        "-i",
        "grpc",
        "-u",
        address,
        "-b",
        "1",
        "--input-data",
        str(file),
        "-f",
        str(table),
    ]
    command += [
        "--async",
        "--concurrency-range",
        f"{callers}:{callers}:1",
        "-p",
        str(window_ms),
        "-r",
        "3",
        "-s",
        "1000",
    ]
    command += [part for name, length in shape.items() for part in ("--shape", f"{name}:{length}")]
    command += ["--percentile", "99"]
    # Three windows are enough: its own search for a stable figure gives up on a machine that is not quiet.
    try:
        done = _run(command, binary.parent, 30.0 + 6 * window_ms / 1000)
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"it found no end with {callers} callers") from None
    if not table.is_file():
        raise NotAvailable(f"it gave no figure with {callers} callers: {_last_line(done.stdout + done.stderr)}")
    return read_table(table)


def read_table(table: Path) -> PerfRow:
    """Read the one row of its CSV file (µs become ms)."""
    with table.open(newline="", encoding="utf-8") as lines:
        row = next(csv.DictReader(lines))

    def ms(*names: str) -> float:
        return sum(float(row[name]) for name in names) / 1000

    return PerfRow(
        callers=int(row["Concurrency"]),
        per_s=float(row["Inferences/Second"]),
        p50_ms=ms("p50 latency"),
        p99_ms=ms("p99 latency"),
        queue_ms=ms("Server Queue"),
        compute_ms=ms("Server Compute Input", "Server Compute Infer", "Server Compute Output"),
    )


def _run(command: Sequence[str], libraries: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    paths = [str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1] if lines else "no message"
