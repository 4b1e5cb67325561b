"""What a figure needs beside it: the machine, the versions, and how busy other programs were."""

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("aiokafka", "fastapi", "grpcio", "numpy", "onnxruntime", "tokenizers", "tritonclient", "uvicorn", "uvloop")
BUSY_SHARE = 0.15
"""More than this share of all cores used by others, and the machine is no place to measure."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def facts(settings: Mapping[str, str]) -> dict[str, object]:
    """Return machine facts for the report; ``settings`` are the TWODOOR_* variables that were set."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "settings": dict(settings),
    }


def settings() -> dict[str, str]:
    """Return the TWODOOR_* variables that are set."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("TWODOOR_")}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Return the commit, with ``+changes`` where the tree differs from it; ``none`` outside a repository."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        dirty = subprocess.run(
            ["git", "status", "--porcelain"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


@dataclass(frozen=True, slots=True)
class CpuMoment:
    """CPU seconds used since boot: by everything, and by our own processes; and when that was read."""

    at_s: float
    all_s: float
    ours_s: float


class CpuWatch:
    """Tells the share of all cores that programs outside the benchmark and its stack used between two moments."""

    def __init__(self, roots: Callable[[], Sequence[int]]) -> None:
        """``roots`` gives the pids whose process trees are ours, besides this process."""
        self._roots = roots

    def read(self) -> CpuMoment:
        """Read the counters now."""
        times = psutil.cpu_times()
        busy_s = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        ours_s = sum(_cpu_s(process) for process in _trees([os.getpid(), *self._roots()]))
        return CpuMoment(time.monotonic(), busy_s, ours_s)

    def others_share(self, since: CpuMoment, until: CpuMoment) -> float:
        """Return others' share of all cores, 0 to 1, the hypervisor's steal included."""
        wall_s = max(until.at_s - since.at_s, 1e-9) * (psutil.cpu_count() or 1)
        others_s = (until.all_s - since.all_s) - (until.ours_s - since.ours_s)
        return min(1.0, max(0.0, others_s / wall_s))


def tree_cpu_s(roots: Sequence[int]) -> float:
    """Return the CPU seconds that these processes and their children have used."""
    return sum(_cpu_s(process) for process in _trees(roots))


def tree_memory_bytes(roots: Sequence[int]) -> int:
    """Return the memory of these processes and their children, pages they share counted once."""
    total = 0
    for process in _trees(roots):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


def _trees(roots: Sequence[int]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in roots:
        try:
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    return found


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children that have ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)


def load_before(seconds: float = 2.0) -> dict[str, float]:
    """Watch the machine before anything of ours runs; returns the load average and the share of cores in use."""
    watch = CpuWatch(lambda: ())
    before = watch.read()
    time.sleep(seconds)
    return {
        "load_1min": os.getloadavg()[0],
        "cpu_share": round(watch.others_share(before, watch.read()), 3),
        "memory_free_gib": round(psutil.virtual_memory().available / 2**30, 1),
    }
