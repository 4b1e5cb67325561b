"""Rows through the topic, by turns with a plain ONNX Runtime loop over the same rows sorted by length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import long_tail, plain_loop
from benchmarks.bench import Bench, Data, Section
from benchmarks.machine import cores
from benchmarks.plain_loop import LoopShape, loop_shapes
from benchmarks.stats import Bar, Figure, IdArray, paired_ratio, percentile
from benchmarks.topic import TopicDriver

BAR = Bar(0.9)
FINALISTS = 2


@dataclass(slots=True)
class TopicRuns:
    """Rows a second of one set of texts: the topic's, and each loop's, round by round."""

    topic: list[float]
    loops: dict[LoopShape, list[float]]
    trials: dict[LoopShape, float]

    @property
    def best(self) -> list[float]:
        """Each round's faster loop."""
        return best_of(self.loops)


async def measure(bench: Bench) -> Section:
    """Find the loop's best shapes on some of the rows, then let topic and loop take turns over all: once with the report's
    texts, once with a long tail of lengths."""
    section = Section(
        "topic", "Rows through the topic, beside a plain ONNX Runtime loop over the same rows, sorted by length"
    )
    runs = await _measure(bench, section)
    section.figures += _figures("", runs)
    long = await long_tail.bench_with(bench, bench.plan.long_tail_rows)
    long_runs = await _measure(long, section)
    section.figures += _figures("long tail: ", long_runs)
    section.notes = [
        "The topic from the first record produced to the last result read.",
        "The loop gets token ids and ready-made batches: tokenizing, JSON and Kafka are in the topic's time and not in the loop's.",
        (
            f"Trials ran {min(len(bench.corpus.rows), bench.plan.topic_trial_rows)} rows; the best {FINALISTS} shapes ran all "
            f"{len(bench.corpus.rows)} by turns with the topic, and each round's faster one is the denominator."
        ),
        f"Lengths in tokens: {lengths_of(bench)}; long tail: {len(long.corpus.rows)} texts, {lengths_of(long)}.",
    ]
    section.data = {**_data(runs), "long_tail": _data(long_runs)}
    return section


async def _measure(bench: Bench, section: Section) -> TopicRuns:
    rows = sorted_rows(bench)
    shapes = await finalists(bench, section)
    runs = TopicRuns([], {shape: [] for shape in shapes}, bench.loop_trials.get(bench.corpus.source, {}))
    async with driver(bench) as bulk:
        await bulk.run(min(len(rows), 64), 120)
        for number in range(bench.plan.topic_rounds):
            bench.say(f"topic: {len(rows)} rows, round {number + 1} of {bench.plan.topic_rounds}")
            for arm in ("topic", "loops") if number % 2 == 0 else ("loops", "topic"):
                if arm == "loops":
                    await run_loops(bench, section, runs.loops, rows)
                    continue
                async with bench.watched(section):
                    run = await bulk.run(len(rows), 600)
                runs.topic.append(run.rows_per_s)
        section.check("topic", bulk.wrong)
    return runs


def _figures(label: str, runs: TopicRuns) -> list[Figure]:
    return [
        paired_ratio(f"{label}topic ÷ best plain loop, rows/s", runs.topic, runs.best, BAR),
        Figure(f"{label}topic", "rows/s", tuple(runs.topic)),
        *(Figure(f"{label}loop {shape}", "rows/s", tuple(found)) for shape, found in runs.loops.items()),
        *(Figure(f"{label}loop {shape} (trial)", "rows/s", (found,)) for shape, found in runs.trials.items()),
    ]


def _data(runs: TopicRuns) -> Data:
    return {
        "topic": runs.topic,
        "loops": {str(shape): found for shape, found in runs.loops.items()},
        "trials": {str(shape): found for shape, found in runs.trials.items()},
    }


def lengths_of(bench: Bench) -> str:
    """Return the middle, the 95th percentile and the largest of the texts' lengths, as a sentence has it."""
    tokens = [row.tokens for row in bench.corpus.rows]
    return f"median {percentile(tokens, 50):.0f}, p95 {percentile(tokens, 95):.0f}, largest {max(tokens)}"


def sorted_rows(bench: Bench) -> list[IdArray]:
    """Return the token ids of all texts, the shortest first."""
    return sorted((row.ids for row in bench.corpus.rows), key=len)


async def finalists(bench: Bench, section: Section) -> list[LoopShape]:
    """Run every shape of the loop over some of the rows, once for all sections with these texts; returns the fastest."""
    shapes = loop_shapes(cores())[: bench.plan.loop_shapes]
    if len(shapes) <= FINALISTS:
        return shapes
    trials = bench.loop_trials.setdefault(bench.corpus.source, {})
    some = _spread(sorted_rows(bench), bench.plan.topic_trial_rows)
    for shape in shapes:
        if shape not in trials:
            trials[shape] = await loop(bench, section, shape, some)
    return sorted(trials, key=lambda shape: -trials[shape])[:FINALISTS]


async def run_loops(
    bench: Bench, section: Section, loops: Mapping[LoopShape, list[float]], rows: Sequence[IdArray]
) -> None:
    """Run each shape of the loop once over all rows."""
    for shape, found in loops.items():
        found.append(await loop(bench, section, shape, rows))


def best_of(loops: Mapping[LoopShape, Sequence[float]]) -> list[float]:
    """Return the faster loop of each round."""
    return [max(found) for found in zip(*loops.values(), strict=True)]


def driver(bench: Bench) -> TopicDriver:
    """Return a driver of the stack's topics."""
    corpus = bench.corpus
    return TopicDriver(bench.stack.kafka, bench.stack.topics, bench.spec.name, corpus.texts, corpus.expected)


def _spread(rows: Sequence[IdArray], count: int) -> list[IdArray]:
    """Return about ``count`` rows with the same mix of lengths."""
    return list(rows[:: max(1, len(rows) // count)])


async def loop(bench: Bench, section: Section, shape: LoopShape, rows: Sequence[IdArray]) -> float:
    """Run the loop once; returns rows a second from the first process's begin to the last one's end."""
    bench.say(f"topic: plain loop, {shape}, {len(rows)} rows")
    folder = bench.stack.repository / bench.spec.name
    return await plain_loop.run(bench.workers, folder, bench.spec, rows, shape, lambda: bench.watched(section))
