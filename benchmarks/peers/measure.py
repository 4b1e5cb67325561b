"""What is measured of every server, whoever wrote it: closed loops, and single calls beside bulk."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.jobs import Closed, Open, Target, run_closed, run_open
from benchmarks.load import CALL_TIMEOUT_S, LoadResult, poisson
from benchmarks.machine import CpuWatch
from benchmarks.peers.plan import Config, PeerPlan
from benchmarks.peers.server import Served
from benchmarks.stats import percentile
from benchmarks.topic import TopicDriver
from benchmarks.workers import Workers

LIMIT_S = 2 * CALL_TIMEOUT_S + 30
CONNECTIONS = 64
SETTLE_S = 1.0
MIX_SEED = 5


@dataclass(slots=True)
class Trial:
    """A short closed loop in one configuration; ``per_s`` is 0 where it did not come up."""

    config: Config
    per_s: float
    note: str = ""


@dataclass(slots=True)
class MixRound:
    """Poisson calls alone, bulk alone, both."""

    alone: LoadResult
    beside: LoadResult
    bulk_alone_per_s: float
    bulk_shared_per_s: float


@dataclass(slots=True)
class Arm:
    """All that was measured of one server. ``errors`` are wrong answers, answers that did not come, and failed starts."""

    name: str
    title: str
    config: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    callers: dict[int, list[LoadResult]] = field(default_factory=dict)
    mix: list[MixRound] = field(default_factory=list)
    rows_per_s: list[float] = field(default_factory=list)
    """Of the plain loop, which answers no calls."""
    others_cpu: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def check(self, where: str, *results: LoadResult) -> None:
        """Keep what went wrong, with its count."""
        for result in results:
            self.errors += [f"{where}: {count} x {what}" for what, count in sorted(result.wrong.items())]
            if result.not_sent:
                self.errors.append(f"{where}: {result.not_sent} x not sent, every connection was waiting")

    def per_s(self, callers: int) -> list[float]:
        """Right answers a second, round by round."""
        return [result.per_s for result in self.callers.get(callers, ())]

    def latency_ms(self, callers: int, percent: float) -> list[float]:
        """A percentile of the latencies, round by round."""
        return [percentile(result.latencies_ms, percent) for result in self.callers.get(callers, ())]


Bulk = Callable[[float], AbstractAsyncContextManager[Callable[[], float]]]
"""Keeps bulk going for about so many seconds while its block runs; its value, asked after the block, is rows a second."""


@dataclass(slots=True)
class Session:
    """One run: what is served, who makes the load, and whose processes are ours."""

    plan: PeerPlan
    served: Served
    workers: Workers
    say: Callable[[str], None]
    roots: Callable[[], Iterable[int]] = tuple

    @asynccontextmanager
    async def watched(self, arm: Arm) -> AsyncIterator[None]:
        """Record how much CPU other programs took while the block ran."""
        watch = CpuWatch(lambda: list(self.roots()))
        before = watch.read()
        yield
        arm.others_cpu.append(watch.others_share(before, watch.read()))

    async def closed(self, arm: Arm, target: Target, callers: int, seconds: float, warm_s: float) -> LoadResult:
        """Run one closed loop."""
        async with self.watched(arm):
            job = Closed(target, callers, warm_s, seconds)
            result = await self.workers.run("calls", run_closed, job, warm_s + seconds + LIMIT_S)
        arm.check(f"{callers} callers", result)
        return result

    async def rounds(self, arm: Arm, target: Target, count: int) -> None:
        """Run ``count`` rounds, each with every number of callers."""
        for _ in range(count):
            for callers in self.plan.callers:
                self.say(f"{arm.name}: {callers} callers")
                result = await self.closed(arm, target, callers, self.plan.closed_s, self.plan.warm_s)
                arm.callers.setdefault(callers, []).append(result)

    async def mix(self, arm: Arm, target: Target, bulk: Bulk, part: int = 0, parts: int = 1) -> None:
        """Run one of ``parts`` parts of the mix: the same calls alone and beside bulk, and for every server."""
        self.say(f"{arm.name}: {self.plan.mix_calls_per_s:g} calls/s, alone and beside bulk")
        moments = moments_of(self.plan, part, parts)
        seconds = self.plan.mix_s / parts
        async with self.watched(arm):
            alone = await self._calls(target, moments)
        async with self.watched(arm), bulk(self.plan.bulk_alone_s) as bulk_alone_per_s:
            await asyncio.sleep(self.plan.bulk_alone_s)
        async with self.watched(arm), bulk(seconds) as bulk_shared_per_s:
            beside = await self._calls(target, moments)
        arm.check("calls alone", alone)
        arm.check("calls beside bulk", beside)
        arm.mix.append(MixRound(alone, beside, bulk_alone_per_s(), bulk_shared_per_s()))

    async def _calls(self, target: Target, moments: list[float]) -> LoadResult:
        limit_s = (moments[-1] if moments else 0.0) + LIMIT_S
        return await self.workers.run("calls", run_open, Open(target, CONNECTIONS, moments), limit_s)

    def callers_as_bulk(self, arm: Arm, target: Target) -> Bulk:
        """Return bulk for a server that has no door for it: callers in a closed loop on the same server."""

        @asynccontextmanager
        async def bulk(seconds: float) -> AsyncIterator[Callable[[], float]]:
            job = Closed(target, self.plan.bulk_callers, SETTLE_S, seconds)
            done: list[LoadResult] = []
            task = asyncio.create_task(self.workers.run("bulk", run_closed, job, SETTLE_S + seconds + LIMIT_S))
            try:
                await asyncio.sleep(SETTLE_S)
                yield lambda: done[0].per_s
            finally:
                # However the block ended: the next arm needs the worker.
                done.append(await task)
            arm.check("bulk", *done)

        return bulk


def moments_of(plan: PeerPlan, part: int, parts: int) -> list[float]:
    """Return the calls' moments in one part of the mix; all parts together are the moments of the whole."""
    seconds = plan.mix_s / parts
    begin_s = part * seconds
    moments = poisson(plan.mix_calls_per_s, plan.mix_s, MIX_SEED)
    return [moment - begin_s for moment in moments if begin_s <= moment < begin_s + seconds]


def topic_as_bulk(arm: Arm, driver: TopicDriver, backlog: int, drain_s: float, settle_s: float = SETTLE_S) -> Bulk:
    """Return bulk for Twodoor: a topic that never runs dry."""

    @asynccontextmanager
    async def bulk(_seconds: float) -> AsyncIterator[Callable[[], float]]:
        end_s = begin_s = 0.0
        async with driver.saturated(backlog, drain_s):
            await asyncio.sleep(settle_s)
            begin_s = time.monotonic()
            yield lambda: driver.rows_between(begin_s, end_s) / (end_s - begin_s)
            end_s = time.monotonic()
            if driver.outstanding < backlog // 4:
                arm.errors.append("the topic ran dry: its rows/s is what was produced, not what is possible")

    return bulk
