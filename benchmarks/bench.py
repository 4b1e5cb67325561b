"""What every section of the report is given, and what each gives back."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.corpus import Corpus
from benchmarks.jobs import Closed, Direct, Open, Predict, Target, run_closed, run_open
from benchmarks.load import CALL_TIMEOUT_S, LoadResult
from benchmarks.machine import CpuWatch
from benchmarks.plain_loop import LoopShape
from benchmarks.plan import Plan
from benchmarks.stack import Endpoints
from benchmarks.stats import Figure
from benchmarks.workers import Workers
from serving.models import ModelSpec

Data = dict[str, Any]


@dataclass(slots=True)
class Section:
    """One part of the report. ``errors`` are answers that were wrong or did not come; ``data`` feeds the picture."""

    name: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    data: Data = field(default_factory=dict)
    others_cpu: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def check(self, where: str, wrong: Counter[str]) -> None:
        """Keep what went wrong, with its count."""
        self.errors += [f"{where}: {count} x {what}" for what, count in sorted(wrong.items())]


@dataclass(frozen=True, slots=True)
class Bench:
    """A run of the report: plan, stack, texts, and the processes that make the load."""

    plan: Plan
    stack: Endpoints
    spec: ModelSpec
    corpus: Corpus
    workers: Workers
    watch: CpuWatch
    say: Callable[[str], None]
    cache: Path
    triton_venv: Path
    loop_trials: dict[str, dict[LoopShape, float]] = field(default_factory=dict)
    """Rows a second of the plain loop's shapes, found once for each source of texts."""
    long_tailed: dict[int, Corpus] = field(default_factory=dict)
    """Texts with a long tail of lengths by their count, made once."""

    @property
    def predict(self) -> Predict:
        """The gateway as a target."""
        return Predict(self.stack.gateway, self.corpus.texts, self.corpus.expected)

    def direct(self) -> Direct:
        """Triton itself as a target: the same rows, tokenized and padded before anything is measured."""
        return Direct(
            self.stack.triton, self.spec.name, self.spec.output, self.corpus.tensors(self.spec), self.corpus.expected
        )

    @asynccontextmanager
    async def watched(self, section: Section) -> AsyncIterator[None]:
        """Record how much CPU other programs took while the block ran."""
        before = self.watch.read()
        yield
        section.others_cpu.append(self.watch.others_share(before, self.watch.read()))

    async def closed(self, section: Section, worker: str, target: Target, callers: int) -> LoadResult:
        """Run one arm of a closed loop."""
        return await self.closed_job(
            section, worker, worker, Closed(target, callers, self.plan.warm_s, self.plan.predict_s)
        )

    async def closed_job(self, section: Section, worker: str, where: str, job: Closed) -> LoadResult:
        """Run a closed loop in a worker; what was wrong goes to the section under ``where``."""
        limit_s = job.warm_s + job.seconds + 2 * CALL_TIMEOUT_S + 30
        async with self.watched(section):
            result = await self.workers.run(worker, run_closed, job, limit_s)
        section.check(f"{where}, {job.callers} callers", result.wrong)
        return result

    async def open(self, section: Section, where: str, target: Target, offsets_s: list[float]) -> LoadResult:
        """Run one arm of an open loop over at most 64 connections."""
        limit_s = (offsets_s[-1] if offsets_s else 0.0) + 2 * CALL_TIMEOUT_S + 30
        async with self.watched(section):
            result = await self.workers.run("gateway", run_open, Open(target, 64, offsets_s), limit_s)
        section.check(where, result.wrong)
        if result.not_sent:
            section.errors.append(f"{where}: {result.not_sent} x not sent, every connection was waiting")
        return result
