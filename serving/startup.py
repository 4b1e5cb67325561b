"""How long a process takes until it is of use: one log line for each phase of its start."""

import os
import time
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)


def process_age_s() -> float:
    """Return the seconds since the kernel started this process, in steps of its clock tick (10 ms)."""
    # Fields are counted behind the name, which stands in brackets and may hold anything.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def phase_done(phase: str, seconds: float) -> None:
    """Log that a phase of the start is over, how long it took, and how old the process is by now."""
    log.info("startup", phase=phase, seconds=round(seconds, 3), age_s=round(process_age_s(), 3))


class Phase:
    """A phase that has begun; ``done`` is told once, later calls say nothing."""

    def __init__(self, name: str) -> None:
        self._name, self._begin_s = name, time.monotonic()
        self._is_done = False

    def done(self) -> None:
        """Log the phase as over."""
        if not self._is_done:
            self._is_done = True
            phase_done(self._name, time.monotonic() - self._begin_s)
