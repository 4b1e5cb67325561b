"""Rows through a job, by turns with the same rows through the topic and with the plain loop."""

from dataclasses import dataclass

from benchmarks import long_tail
from benchmarks.bench import Bench, Data, Section
from benchmarks.job_door import JobDriver
from benchmarks.plain_loop import LoopShape
from benchmarks.sections.topic import best_of, driver, finalists, run_loops, sorted_rows
from benchmarks.stats import Bar, Figure, paired_ratio

BAR = Bar(0.95)
LOOP_BAR = Bar(0.9)
LIMIT_S = 600.0


@dataclass(slots=True)
class JobRuns:
    """Rows a second of one set of texts, round by round."""

    job: list[float]
    topic: list[float]
    loops: dict[LoopShape, list[float]]


async def measure(bench: Bench) -> Section:
    """Let job, topic and loop take turns over all rows, once with the report's texts and once with a long tail.

    Job and topic count from the first byte sent to the last row's result.
    """
    section = Section("job", "Rows through a job, beside the same rows through the topic and the plain loop")
    runs = await _measure(bench, section)
    section.figures += _figures("", runs)
    long_runs = await _measure(await long_tail.bench_with(bench, bench.plan.long_tail_rows), section)
    section.figures += _figures("long tail: ", long_runs)
    section.notes.append(
        "Job and topic from the first byte sent to the last result; the job's time includes its closing."
    )
    section.notes.append("The loop gets token ids and ready-made batches, sorted by length, and runs each text once.")
    section.data = {**_data(runs), "long_tail": _data(long_runs)}
    return section


async def _measure(bench: Bench, section: Section) -> JobRuns:
    runs = JobRuns([], [], {shape: [] for shape in await finalists(bench, section)})
    host, port = bench.stack.gateway
    texts = bench.corpus.texts
    async with driver(bench) as bulk, JobDriver(f"http://{host}:{port}", bench.spec.name) as jobs:
        await bulk.run(min(len(texts), 64), 120)
        await jobs.run(texts, min(len(texts), 64), 120)
        for number in range(bench.plan.topic_rounds):
            rows = len(texts) * bench.plan.job_passes
            bench.say(f"job: {rows} rows, round {number + 1} of {bench.plan.topic_rounds}")
            for door in ("topic", "job", "loops") if number % 2 == 0 else ("loops", "job", "topic"):
                if door == "loops":
                    await run_loops(bench, section, runs.loops, sorted_rows(bench))
                    continue
                async with bench.watched(section):
                    if door == "topic":
                        runs.topic.append((await bulk.run(rows, LIMIT_S)).rows_per_s)
                    else:
                        run = await jobs.run(texts, rows, LIMIT_S)
                        runs.job.append(run.rows_per_s)
                if door == "job":
                    await jobs.check(run, bench.corpus.expected)
        section.check("topic", bulk.wrong)
        section.check("job", jobs.wrong)
    return runs


def _figures(label: str, runs: JobRuns) -> list[Figure]:
    return [
        Figure(f"{label}job", "rows/s", tuple(runs.job)),
        Figure(f"{label}topic", "rows/s", tuple(runs.topic)),
        Figure(f"{label}best plain loop", "rows/s", tuple(best_of(runs.loops))),
        paired_ratio(f"{label}job ÷ topic, rows/s", runs.job, runs.topic, BAR),
        paired_ratio(f"{label}job ÷ best plain loop, rows/s", runs.job, best_of(runs.loops), LOOP_BAR),
        paired_ratio(f"{label}topic ÷ best plain loop, rows/s", runs.topic, best_of(runs.loops), LOOP_BAR),
    ]


def _data(runs: JobRuns) -> Data:
    return {"job": runs.job, "topic": runs.topic}
