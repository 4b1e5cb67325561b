"""Rows through a job, by turns with the same rows through the topic."""

from benchmarks.bench import Bench, Section
from benchmarks.job_door import JobDriver
from benchmarks.sections.topic import driver
from benchmarks.stats import Bar, Figure, paired_ratio

BAR = Bar(0.95)
LIMIT_S = 600.0


async def measure(bench: Bench) -> Section:
    """Let job and topic take turns over all rows; both count from the first byte sent to the last row's result."""
    section = Section("job", "Rows through a job, beside the same rows through the topic")
    texts, rows = bench.corpus.texts, len(bench.corpus.texts) * bench.plan.job_passes
    job: list[float] = []
    topic: list[float] = []
    host, port = bench.stack.gateway
    async with driver(bench) as bulk, JobDriver(f"http://{host}:{port}", bench.spec.name) as jobs:
        await bulk.run(min(len(texts), 64), 120)
        await jobs.run(texts, min(len(texts), 64), 120)
        for number in range(bench.plan.topic_rounds):
            bench.say(f"job: {rows} rows, round {number + 1} of {bench.plan.topic_rounds}")
            for door in ("topic", "job") if number % 2 == 0 else ("job", "topic"):
                async with bench.watched(section):
                    if door == "topic":
                        topic.append((await bulk.run(rows, LIMIT_S)).rows_per_s_from_produce)
                    else:
                        run = await jobs.run(texts, rows, LIMIT_S)
                        job.append(run.rows_per_s)
                if door == "job":
                    await jobs.check(run, bench.corpus.expected)
        section.check("topic", bulk.wrong)
        section.check("job", jobs.wrong)
    section.figures = [
        Figure("job", "rows/s", tuple(job)),
        Figure("topic", "rows/s", tuple(topic)),
        paired_ratio("job ÷ topic, rows/s", job, topic, BAR),
    ]
    section.notes.append("Both from the first byte sent to the last result; the job's time includes its closing.")
    section.data = {"job": job, "topic": topic}
    return section
