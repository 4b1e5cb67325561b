"""Rows through the topic, by turns with a plain ONNX Runtime loop over the same rows sorted by length."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bench import Bench, Section
from benchmarks.machine import cores
from benchmarks.ort_loop import LoopJob, prepare, run_prepared
from benchmarks.stats import Bar, Figure, IdArray, paired_ratio
from benchmarks.topic import TopicDriver

BAR = Bar(0.7)
TOGETHER_S = 0.2
FINALISTS = 2


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
    """Return every way to use ``count`` cores: one process with all, or one each. A lone thread has nobody to spin for."""
    shapes = [LoopShape(1, count, batch, spin) for batch in (16, 32) for spin in (False, True)]
    return shapes + ([LoopShape(count, 1, batch, False) for batch in (16, 32)] if count > 1 else [])


async def measure(bench: Bench) -> Section:
    """Find the loop's best shapes on some of the rows, then let topic and loop take turns over all."""
    section = Section(
        "topic", "Rows through the topic, beside a plain ONNX Runtime loop over the same rows, sorted by length"
    )
    rows = sorted((row.ids for row in bench.corpus.rows), key=len)
    trials = {
        shape: await _loop(bench, section, shape, _spread(rows, bench.plan.topic_trial_rows))
        for shape in loop_shapes(cores())
    }
    finalists = sorted(trials, key=lambda shape: -trials[shape])[:FINALISTS]
    loops: dict[LoopShape, list[float]] = {shape: [] for shape in finalists}
    topic: list[float] = []
    from_produce: list[float] = []
    async with driver(bench) as bulk:
        await bulk.run(min(len(rows), 64), 120)
        for number in range(bench.plan.topic_rounds):
            bench.say(f"topic: {len(rows)} rows, round {number + 1} of {bench.plan.topic_rounds}")
            async with bench.watched(section):
                run = await bulk.run(len(rows), 600)
            topic.append(run.rows_per_s)
            from_produce.append(run.rows_per_s_from_produce)
            for shape in finalists:
                loops[shape].append(await _loop(bench, section, shape, rows))
        section.check("topic", bulk.wrong)
    best = [max(runs) for runs in zip(*loops.values(), strict=True)]
    section.figures = [
        paired_ratio("topic ÷ best plain loop, rows/s", topic, best, BAR),
        paired_ratio("the same, counted from the first record produced", from_produce, best),
        Figure("topic", "rows/s", tuple(topic)),
        *(Figure(f"loop {shape}", "rows/s", tuple(runs)) for shape, runs in loops.items()),
        *(Figure(f"loop {shape} (trial)", "rows/s", (trials[shape],)) for shape in trials),
    ]
    section.notes = [
        "The loop gets token ids and ready-made batches: tokenizing, JSON and Kafka are in the topic's time and not in the loop's.",
        (
            f"Trials ran {min(len(rows), bench.plan.topic_trial_rows)} rows; the best {FINALISTS} ran all {len(rows)} "
            "by turns with the topic, and each round's faster one is the denominator."
        ),
    ]
    section.data = {
        "topic": topic,
        "loops": {str(shape): runs for shape, runs in loops.items()},
        "trials": {str(s): v for s, v in trials.items()},
    }
    return section


def driver(bench: Bench) -> TopicDriver:
    """Return a driver of the stack's topics."""
    corpus = bench.corpus
    return TopicDriver(bench.stack.kafka, bench.stack.topics, bench.spec.name, corpus.texts, corpus.expected)


def _spread(rows: Sequence[IdArray], count: int) -> list[IdArray]:
    """Return about ``count`` rows with the same mix of lengths."""
    return list(rows[:: max(1, len(rows) // count)])


async def _loop(bench: Bench, section: Section, shape: LoopShape, rows: Sequence[IdArray]) -> float:
    """Run the loop once; returns rows a second from the first process's begin to the last one's end."""
    bench.say(f"topic: plain loop, {shape}, {len(rows)} rows")
    model = str(bench.stack.repository / bench.spec.name / "1" / "model.onnx")
    names = [f"loop-{share}" for share in range(shape.processes)]
    jobs = [
        LoopJob(
            model, bench.spec.inputs, bench.spec.output, rows, shape.batch, shape.threads, shape.spin, share, len(names)
        )
        for share in range(len(names))
    ]
    await asyncio.gather(*(bench.workers.run(name, prepare, job, 120) for name, job in zip(names, jobs, strict=True)))
    begin_at_s = time.monotonic() + TOGETHER_S
    async with bench.watched(section):
        shares = await asyncio.gather(*(bench.workers.run(name, run_prepared, begin_at_s, 300) for name in names))
    return len(rows) / (max(share.end_s for share in shares) - min(share.begin_s for share in shares))
