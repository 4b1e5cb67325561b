"""Both doors at once: Poisson callers alone and beside a saturated topic, and the topic with and without them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.bench import Bench, Data, Section
from benchmarks.load import LoadResult, poisson, steady
from benchmarks.machine import cores
from benchmarks.plan import MixPlan
from benchmarks.sections.topic import driver
from benchmarks.stats import Bar, Figure, paired_ratio, percentile
from benchmarks.topic import TopicDriver

P50_BAR = Bar(1.2, at_least=False)
P99_BAR = Bar(1.5, at_least=False)
KEPT_BAR = Bar(0.9)
BARS_CALLS_PER_S = 6.0
"""The rate the bars are for: at more calls a second bulk has to give way, and is compared with what is left to it."""
WARM_CALLS_PER_S = 20.0
IDLE_SETTLE_S = 1.0
DRAIN_S = 300.0
STEP_S = 1.0
"""Rows a second are drawn for steps of this length."""


@dataclass(slots=True)
class _Rows:
    """Rows that became readable in windows of ``seconds`` in all."""

    count: float = 0.0
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        return self.count / self.seconds if self.seconds else float("nan")


@dataclass(slots=True)
class Run:
    """All rounds of one run at one rate."""

    alone: list[LoadResult] = field(default_factory=list)
    beside: list[LoadResult] = field(default_factory=list)
    topic_alone: _Rows = field(default_factory=_Rows)
    topic_shared: _Rows = field(default_factory=_Rows)
    calls_cpu_s: float = 0.0
    """CPU that our processes used while calls came alone, in ``calls_wall_s``."""
    calls_wall_s: float = 0.0
    ran_dry: bool = False
    """Whether the topic had hardly a record left somewhere: then its rows/s say what was produced, not what is possible."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Arm, begin and end of each window, on the monotonic clock."""

    def ms(self, arm: str, percent: float) -> float:
        """Return a percentile of the calls' latencies, ``alone`` or ``beside`` the topic."""
        return percentile(self.latencies_ms(arm), percent)

    def latencies_ms(self, arm: str) -> list[float]:
        """Return the calls' latencies, ``alone`` or ``beside`` the topic."""
        return _latencies(self.alone if arm == "alone" else self.beside)

    @property
    def kept(self) -> float:
        """What the topic kept of its rows/s with calls beside it; NaN where it ran dry, which meets no bar."""
        alone_per_s = self.topic_alone.per_s
        return float("nan") if self.ran_dry or not alone_per_s else self.topic_shared.per_s / alone_per_s


async def measure(bench: Bench) -> Section:
    """Measure each rate: in every round calls alone, then the topic with and without calls (A-B-A-B)."""
    plan = bench.plan
    section = Section("mix", "Both doors at once: Poisson calls and a saturated topic")
    runs: dict[float, list[Run]] = {}
    async with driver(bench) as bulk:
        await bulk.run(min(len(bench.corpus.texts), 64), 120)
        await bench.open(section, "first calls", bench.predict, steady(WARM_CALLS_PER_S, plan.warm_s))
        idle_cores = await _idle_cores(bench)
        for mix in plan.mixes:
            runs[mix.calls_per_s] = [await one_run(bench, section, bulk, mix, number) for number in range(mix.runs)]
            section.figures += _figures(mix.calls_per_s, runs[mix.calls_per_s], idle_cores)
        section.check("topic", bulk.wrong)
    section.notes += _notes(runs, bulk)
    section.data = {f"{rate:g}": _data(measured, bulk) for rate, measured in runs.items()}
    return section


async def _idle_cores(bench: Bench) -> float:
    """Return how many cores our processes use while nothing is asked of them."""
    await asyncio.sleep(min(IDLE_SETTLE_S, bench.plan.mix_idle_s))
    before = bench.watch.read()
    await asyncio.sleep(bench.plan.mix_idle_s)
    after = bench.watch.read()
    return (after.ours_s - before.ours_s) / (after.at_s - before.at_s)


async def one_run(bench: Bench, section: Section, bulk: TopicDriver, mix: MixPlan, number: int) -> Run:
    """Measure all rounds of one run; ``number`` decides the moments and texts of its calls."""
    run = Run()
    for place in range(mix.rounds):
        bench.say(
            f"mix: {mix.calls_per_s:g} calls/s, run {number + 1} of {mix.runs}, round {place + 1} of {mix.rounds}"
        )
        seed = number * mix.rounds + place
        before = bench.watch.read()
        run.alone.append(await _calls(bench, section, run, mix, seed, "alone"))
        after = bench.watch.read()
        run.calls_cpu_s += after.ours_s - before.ours_s
        run.calls_wall_s += after.at_s - before.at_s
        await _with_topic(bench, section, bulk, run, mix, seed)
    return run


async def _with_topic(bench: Bench, section: Section, bulk: TopicDriver, run: Run, mix: MixPlan, seed: int) -> None:
    """Saturate the topic and measure it alone and shared; every other round turns their order round."""
    windows: list[tuple[_Rows, float, float]] = []
    async with bulk.saturated(bench.plan.mix_backlog, DRAIN_S):
        await asyncio.sleep(mix.settle_s)
        for shared in (True, False) if seed % 2 == 0 else (False, True):
            begin_s = time.monotonic()
            if shared:
                run.beside.append(await _calls(bench, section, run, mix, seed, "beside"))
            else:
                async with bench.watched(section):
                    await asyncio.sleep(mix.bulk_s)
                run.spans.append(("topic", begin_s, time.monotonic()))
            windows.append((run.topic_shared if shared else run.topic_alone, begin_s, time.monotonic()))
            if bulk.outstanding < bench.plan.mix_backlog // 4:
                run.ran_dry = True
                section.notes.append("the topic ran dry: its rows/s is what was produced, not what is possible")
    for rows, begin_s, end_s in windows:
        rows.count += bulk.rows_between(begin_s, end_s)
        rows.seconds += end_s - begin_s


async def _calls(bench: Bench, section: Section, run: Run, mix: MixPlan, seed: int, arm: str) -> LoadResult:
    """Let the calls of one window come; both arms of a round have the same moments and texts."""
    begin_s = time.monotonic()
    where = f"{mix.calls_per_s:g} calls/s {arm}"
    result = await bench.open(section, where, bench.predict, poisson(mix.calls_per_s, mix.seconds, seed))
    run.spans.append((arm, begin_s, time.monotonic()))
    return result


def _figures(rate: float, runs: list[Run], idle_cores: float) -> list[Figure]:
    label = f"{rate:g} calls/s"
    bars = (P50_BAR, P99_BAR, KEPT_BAR) if rate == BARS_CALLS_PER_S else (None, None, None)
    figures = []
    for percent, bar in ((50, bars[0]), (99, bars[1])):
        alone, beside = ([run.ms(arm, percent) for run in runs] for arm in ("alone", "beside"))
        figures += [
            paired_ratio(f"{label}: p{percent} beside the topic ÷ alone", beside, alone, bar),
            Figure(f"{label}: p{percent} alone", "ms", tuple(alone)),
            Figure(f"{label}: p{percent} beside the topic", "ms", tuple(beside)),
            *_pooled(f"{label}: p{percent}", runs, percent),
        ]
    topic_alone, shared = [run.topic_alone.per_s for run in runs], [run.topic_shared.per_s for run in runs]
    shares = [calls_share(run.calls_cpu_s, run.calls_wall_s, idle_cores) for run in runs]
    left = [rows * (1 - share) for rows, share in zip(topic_alone, shares, strict=True)]
    return [
        *figures,
        Figure(f"{label}: topic with calls ÷ alone, rows/s", "ratio", tuple(run.kept for run in runs), bars[2]),
        paired_ratio(
            f"{label}: topic ÷ its share of the CPU that is left", shared, left, headline=rate != BARS_CALLS_PER_S
        ),
        Figure(f"{label}: topic alone", "rows/s", tuple(topic_alone)),
        Figure(f"{label}: topic with calls", "rows/s", tuple(shared)),
        Figure(f"{label}: the calls' own share of the CPU, alone", "%", tuple(100 * share for share in shares)),
    ]


def _pooled(label: str, runs: list[Run], percent: float) -> list[Figure]:
    """Return a percentile of all runs' calls together: it stands on as many calls as there were."""
    if len(runs) < 2:
        return []
    alone, beside = (
        percentile([value for run in runs for value in run.latencies_ms(arm)], percent) for arm in ("alone", "beside")
    )
    return [
        paired_ratio(f"{label} beside the topic ÷ alone, all runs' calls", [beside], [alone], headline=True),
        Figure(f"{label} alone, all runs' calls", "ms", (alone,)),
        Figure(f"{label} beside the topic, all runs' calls", "ms", (beside,)),
    ]


def calls_share(cpu_s: float, wall_s: float, idle_cores: float) -> float:
    """Return the calls' own share of all cores, 0 to 1: what was used while they came alone, less the idle stack's part."""
    return min(1.0, max(0.0, (cpu_s / wall_s - idle_cores) / cores()))


def _notes(runs: dict[float, list[Run]], bulk: TopicDriver) -> list[str]:
    notes = []
    for rate, measured in runs.items():
        counts = [len(run.latencies_ms(arm)) for run in measured for arm in ("alone", "beside")]
        together = min(sum(counts[::2]), sum(counts[1::2]))
        notes.append(
            f"{rate:g} calls/s: runs x rounds (calls alone, then with the topic): {len(measured)} x {len(measured[0].alone)}, "
            f"at least {min(counts)} calls in each arm of a run, {together} in all runs' together, the same moments and texts in "
            "both. A figure without more is the median of the runs' own percentiles."
        )
    return [
        *notes,
        (
            "What is left to the topic: its rows/s alone x (1 - the share of all cores that the calls use alone; load "
            "generator included, the idle stack's part taken off)."
        ),
        "Rows/s: a transaction's rows count as made evenly since the one before, so that a window may cut it.",
        f"{len(bulk.arrivals_s)} rows through the topic; every answer of both doors was checked.",
    ]


def _data(runs: list[Run], bulk: TopicDriver) -> Data:
    """Return what the pictures need: all latencies, each run's rows/s, and the first run over time."""
    first = runs[0]
    zero_s = first.spans[0][1]
    return {
        "alone_ms": [value for run in runs for value in _latencies(run.alone)],
        "beside_ms": [value for run in runs for value in _latencies(run.beside)],
        "topic_alone": [run.topic_alone.per_s for run in runs],
        "topic_shared": [run.topic_shared.per_s for run in runs],
        "time": {
            "spans": [[arm, begin_s - zero_s, end_s - zero_s] for arm, begin_s, end_s in first.spans],
            **{
                arm: {
                    "at_s": [float(at_s) - zero_s for result in results for at_s in result.done_at_s],
                    "ms": _latencies(results),
                }
                for arm, results in (("alone", first.alone), ("beside", first.beside))
            },
            "rows_per_s": steps(bulk.arrivals_s, zero_s, first.spans[-1][2]),
        },
    }


def steps(arrivals_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Return rows a second for each whole step from ``begin_s`` on."""
    edges = begin_s + STEP_S * np.arange(int((end_s - begin_s) / STEP_S) + 1)
    return [float(count) / STEP_S for count in np.histogram(arrivals_s, edges)[0]] if len(edges) > 1 else []


def _latencies(results: list[LoadResult]) -> list[float]:
    return [float(value) for result in results for value in result.latencies_ms]
