"""Processes of their own for load generators and loops, so that none shares an interpreter with what watches it."""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

J = TypeVar("J")
R = TypeVar("R")
PR_SET_PDEATHSIG = 1


class Workers:
    """Long-lived worker processes by name; each runs one job at a time. Use as a context manager."""

    def __init__(self) -> None:
        self._pools: dict[str, ProcessPoolExecutor] = {}
        self._pids: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # Nobody waits for what they would still measure.
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

    async def run(self, name: str, work: Callable[[J], R], job: J, timeout_s: float) -> R:
        """Run ``work(job)`` in the worker called ``name`` (started when first named); raises what the work raised."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            if name not in self._pools:
                # Spawned, not forked: gRPC and event loops do not survive a fork.
                self._pools[name] = ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
                )
                self._pids.append(await loop.run_in_executor(self._pools[name], os.getpid))
            return await loop.run_in_executor(self._pools[name], work, job)


def _end_with_parent() -> None:
    """No worker outlives a killed benchmark. Ctrl-C is the parent's to handle."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
