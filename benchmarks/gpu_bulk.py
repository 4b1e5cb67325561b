"""Rows through topic and job by turns, with nothing beside them: on a GPU a plain loop on the CPU is no measure."""

from benchmarks.bench import Bench, Section
from benchmarks.job_door import JobDriver
from benchmarks.sections.topic import driver
from benchmarks.stats import Figure, paired_ratio

LIMIT_S = 120.0
WARM_ROWS = 512


async def measure(bench: Bench) -> Section:
    """Let topic and job take turns over the texts, ``job_passes`` times each; both from the first byte to the last result."""
    section = Section("bulk", "Rows through the topic and through a job")
    texts = bench.corpus.texts
    rows = len(texts) * bench.plan.job_passes
    job: list[float] = []
    topic: list[float] = []
    host, port = bench.stack.gateway
    async with driver(bench) as bulk, JobDriver(f"http://{host}:{port}", bench.spec.name) as jobs:
        await bulk.run(min(WARM_ROWS, rows), LIMIT_S)
        for number in range(bench.plan.topic_rounds):
            bench.say(f"{rows} rows through each, round {number + 1} of {bench.plan.topic_rounds}")
            topic.append((await bulk.run(rows, LIMIT_S)).rows_per_s)
            run = await jobs.run(texts, rows, LIMIT_S)
            job.append(run.rows_per_s)
            await jobs.check(run, bench.corpus.expected)
        section.check("topic", bulk.wrong)
        section.check("job", jobs.wrong)
    section.figures = [
        Figure("topic", "rows/s", tuple(topic)),
        Figure("job", "rows/s", tuple(job)),
        paired_ratio("job ÷ topic, rows/s", job, topic),
    ]
    return section
