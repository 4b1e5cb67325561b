"""Closed and open loops: what callers do, whatever they call. Latency counts from the moment a call was meant to start."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

CALL_TIMEOUT_S = 20.0

Call = Callable[[int], Awaitable[str]]
"""Makes call number N over one connection; returns an empty string, or in a word what was wrong with the answer."""


@dataclass(slots=True)
class LoadResult:
    """What callers saw in one window of ``seconds``; latencies are in ms, ``done_at_s`` on the monotonic clock."""

    seconds: float
    latencies_ms: npt.NDArray[np.float64]
    done_at_s: npt.NDArray[np.float64]
    wrong: Counter[str] = field(default_factory=Counter)
    """Every answer that was wrong or did not come, those before and after the window as well."""
    wrong_outside: int = 0
    """How many of ``wrong`` came before or after the window."""
    not_sent: int = 0
    cpu_s: float = 0.0

    @property
    def calls(self) -> int:
        """Calls answered in the window, rightly or not."""
        return len(self.latencies_ms)

    @property
    def per_s(self) -> float:
        """Right answers a second."""
        return (self.calls - self.wrong.total() + self.wrong_outside) / self.seconds

    def per_s_of_cores_left(self, cores: int) -> float:
        """Right answers a second for each of ``cores`` that the load generator itself did not use."""
        return self.per_s / max(cores - self.cpu_s / self.seconds, 1e-9)


class _Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[float, float, str]] = []

    async def make(self, call: Call, number: int, intended_s: float) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                wrong = await call(number)
        except (OSError, TimeoutError) as exc:
            wrong = type(exc).__name__
        done_s = time.monotonic()
        self.rows.append((done_s, (done_s - intended_s) * 1000, wrong))

    def result(self, since_s: float, until_s: float) -> LoadResult:
        rows = [row for row in self.rows if since_s <= row[0] <= until_s]
        return LoadResult(
            seconds=until_s - since_s,
            latencies_ms=np.array([row[1] for row in rows], dtype=np.float64),
            done_at_s=np.array([row[0] for row in rows], dtype=np.float64),
            # A call that never came back in the window is wrong all the same.
            wrong=Counter(row[2] for row in self.rows if row[2]),
            wrong_outside=sum(bool(row[2]) for row in self.rows) - sum(bool(row[2]) for row in rows),
        )


async def closed_loop(calls: Sequence[Call], warm_s: float, seconds: float, *, late: bool = False) -> LoadResult:
    """Each caller sends its next call when it has its answer; calls answered in the ``seconds`` after ``warm_s`` count.

    ``late``: those begun in time and answered later count as well.
    """
    recorder = _Recorder()
    numbers = itertools.count()
    begin_s = time.monotonic() + warm_s
    end_s = begin_s + seconds

    async def caller(call: Call) -> None:
        while (now_s := time.monotonic()) < end_s:
            await recorder.make(call, next(numbers), now_s)

    cpu_s = time.process_time()
    await asyncio.gather(*map(caller, calls))
    result = recorder.result(begin_s, time.monotonic() if late else end_s)
    # The warm-up's calls cost as much as the others.
    result.cpu_s = (time.process_time() - cpu_s) * result.calls / max(1, len(recorder.rows))
    return result


async def open_loop(calls: Sequence[Call], offsets_s: Sequence[float], grace_s: float = 5.0) -> LoadResult:
    """Calls start at fixed moments, whether earlier ones were answered or not, as far as there are connections.

    ``offsets_s`` are seconds from now, rising. A call that waits for a connection keeps its intended start, so its
    wait is part of its latency. Calls not begun ``grace_s`` after the last moment are counted as not sent.
    """
    recorder = _Recorder()
    numbers = iter(enumerate(offsets_s))
    start_s = time.monotonic()
    end_s = start_s + (offsets_s[-1] if offsets_s else 0.0) + grace_s

    async def connection(call: Call) -> None:
        for number, offset_s in numbers:
            intended_s = start_s + offset_s
            await asyncio.sleep(max(0.0, intended_s - time.monotonic()))
            if time.monotonic() > end_s:
                recorder.rows.append((time.monotonic(), float("inf"), "not sent"))
                continue
            await recorder.make(call, number, intended_s)

    cpu_s = time.process_time()
    await asyncio.gather(*map(connection, calls))
    not_sent = sum(1 for row in recorder.rows if row[2] == "not sent")
    recorder.rows = [row for row in recorder.rows if row[2] != "not sent"]
    result = recorder.result(start_s, time.monotonic())
    result.not_sent = not_sent
    result.seconds = max(offsets_s[-1], 1e-9) if offsets_s else 0.0
    result.cpu_s = time.process_time() - cpu_s
    return result


def steady(rate_per_s: float, seconds: float) -> list[float]:
    """Return evenly spaced moments."""
    return [n / rate_per_s for n in range(int(rate_per_s * seconds))]


def poisson(rate_per_s: float, seconds: float, seed: int) -> list[float]:
    """Return the moments of a Poisson process, the same for the same seed."""
    draw = np.random.default_rng(seed)
    gaps = draw.exponential(1 / rate_per_s, size=int(rate_per_s * seconds * 3) + 16)
    moments = np.cumsum(gaps)
    return [float(moment) for moment in moments[moments < seconds]]
