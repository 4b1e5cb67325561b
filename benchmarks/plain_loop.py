"""The plain loop in processes of its own: every shape that uses all cores, and one run of one of them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ort_loop import LoopJob, prepare, run_prepared
from benchmarks.stats import IdArray
from benchmarks.workers import Workers
from serving.models import ModelSpec

TOGETHER_S = 0.2
BATCHES = (32, 16, 64)


@dataclass(frozen=True, slots=True)
class LoopShape:
    """How the plain loop uses the cores."""

    processes: int
    threads: int
    batch: int
    spin: bool

    def __str__(self) -> str:
        spinning = ", spinning" if self.spin else ""
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{processes} x {threads}{spinning}, batches of {self.batch}"


def loop_shapes(count: int) -> list[LoopShape]:
    """Return, those first that come out well most often, every way to use ``count`` cores: one process with all, or one each. A lone thread has nobody to spin for."""
    shapes = []
    for batch in BATCHES:
        shapes.append(LoopShape(1, count, batch, False))
        if count > 1:
            shapes += [LoopShape(count, 1, batch, False), LoopShape(1, count, batch, True)]
    return shapes


async def run(
    workers: Workers,
    folder: Path,
    spec: ModelSpec,
    rows: Sequence[IdArray],
    shape: LoopShape,
    watched: Callable[[], AbstractAsyncContextManager[None]],
) -> float:
    """Run over ``rows``, the shortest first, by the model in ``folder``; ``watched`` is entered while it runs.

    Returns rows a second from the first process's begin to the last one's end.
    """
    names = [f"loop-{share}" for share in range(shape.processes)]
    model = str(folder / "1" / "model.onnx")
    jobs = [
        LoopJob(model, spec.inputs, spec.output, rows, shape.batch, shape.threads, shape.spin, share, len(names))
        for share in range(len(names))
    ]
    await asyncio.gather(*(workers.run(name, prepare, job, 120) for name, job in zip(names, jobs, strict=True)))
    begin_at_s = time.monotonic() + TOGETHER_S
    async with watched():
        shares = await asyncio.gather(*(workers.run(name, run_prepared, begin_at_s, 300) for name in names))
    return len(rows) / (max(share.end_s for share in shares) - min(share.begin_s for share in shares))
