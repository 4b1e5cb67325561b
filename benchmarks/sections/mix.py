"""Both doors at once: Poisson callers alone and beside a saturated topic, and the topic with and without them."""

import asyncio
import time
from dataclasses import dataclass, field

from benchmarks.bench import Bench, Section
from benchmarks.load import LoadResult, poisson
from benchmarks.sections.topic import driver
from benchmarks.stats import Bar, Figure, paired_ratio, percentile
from benchmarks.topic import TopicDriver

P50_BAR = Bar(2.0, at_least=False)
SHARED_BAR = Bar(0.8)
SETTLE_S = 1.0
DRAIN_S = 300.0


@dataclass(slots=True)
class _Rounds:
    alone: list[LoadResult] = field(default_factory=list)
    beside: list[LoadResult] = field(default_factory=list)
    topic_alone: list[float] = field(default_factory=list)
    topic_shared: list[float] = field(default_factory=list)


async def measure(bench: Bench) -> Section:
    """Run the arms in rounds; every other round turns their order round."""
    plan = bench.plan
    section = Section("mix", f"Both doors at once: {plan.mix_calls_per_s:g} Poisson calls/s and a saturated topic")
    rounds = _Rounds()
    async with driver(bench) as bulk:
        await bulk.run(min(len(bench.corpus.texts), 64), 120)
        for number in range(plan.mix_rounds):
            bench.say(f"mix: round {number + 1} of {plan.mix_rounds}")
            if number % 2 == 0:
                rounds.alone.append(await _calls(bench, section, number, "alone"))
            await _with_topic(bench, section, bulk, rounds, number)
            if number % 2 == 1:
                rounds.alone.append(await _calls(bench, section, number, "alone"))
        section.check("topic", bulk.wrong)
    section.figures = _figures(rounds)
    calls = sum(run.calls for run in rounds.alone + rounds.beside)
    section.notes.append(
        f"{calls} calls (the same moments and texts in both arms of a round) and {len(bulk.arrivals_s)} rows, every answer checked."
    )
    section.data = {
        "alone_ms": [value for run in rounds.alone for value in run.latencies_ms.tolist()],
        "beside_ms": [value for run in rounds.beside for value in run.latencies_ms.tolist()],
        "topic_alone": rounds.topic_alone,
        "topic_shared": rounds.topic_shared,
    }
    return section


async def _with_topic(bench: Bench, section: Section, bulk: TopicDriver, rounds: _Rounds, number: int) -> None:
    """Saturate the topic and measure it alone and shared, the order by the round's number."""
    async with bulk.saturated(bench.plan.mix_backlog, DRAIN_S):
        await asyncio.sleep(SETTLE_S)
        for shared in (True, False) if number % 2 == 0 else (False, True):
            begin_s = time.monotonic()
            if shared:
                rounds.beside.append(await _calls(bench, section, number, "beside the topic"))
            else:
                async with bench.watched(section):
                    await asyncio.sleep(bench.plan.mix_s)
            end_s = time.monotonic()
            rows_per_s = bulk.rows_between(begin_s, end_s) / (end_s - begin_s)
            (rounds.topic_shared if shared else rounds.topic_alone).append(rows_per_s)
            if bulk.outstanding < bench.plan.mix_backlog // 4:
                section.notes.append(
                    f"round {number + 1}: the topic ran dry; its rows/s is what was produced, not what is possible"
                )


async def _calls(bench: Bench, section: Section, seed: int, where: str) -> LoadResult:
    moments = poisson(bench.plan.mix_calls_per_s, bench.plan.mix_s, seed)
    return await bench.open(section, f"calls {where}", bench.predict, moments)


def _figures(rounds: _Rounds) -> list[Figure]:
    figures = []
    for percent, bar in ((50, P50_BAR), (99, None)):
        alone = [percentile(run.latencies_ms, percent) for run in rounds.alone]
        beside = [percentile(run.latencies_ms, percent) for run in rounds.beside]
        figures += [
            paired_ratio(f"calls' p{percent} beside the topic ÷ alone", beside, alone, bar),
            Figure(f"calls alone: p{percent}", "ms", tuple(alone)),
            Figure(f"calls beside the topic: p{percent}", "ms", tuple(beside)),
        ]
    return [
        *figures,
        paired_ratio("topic with calls ÷ alone, rows/s", rounds.topic_shared, rounds.topic_alone, SHARED_BAR),
        Figure("topic alone", "rows/s", tuple(rounds.topic_alone)),
        Figure("topic with calls", "rows/s", tuple(rounds.topic_shared)),
    ]
