"""What happens to the cost of one when there are many: rows, callers, models, tokens of a text."""

from collections import defaultdict
from collections.abc import Sequence

from benchmarks import corpus, machine
from benchmarks.bench import Bench, Section
from benchmarks.copies import Copies, copies, copy_name
from benchmarks.corpus import Corpus, Texts
from benchmarks.job_door import JobDriver
from benchmarks.jobs import Closed, Predict
from benchmarks.load import LoadResult
from benchmarks.stack import Endpoints
from benchmarks.stats import Bar, Figure, paired_ratio, percentile
from benchmarks.topic import TopicDriver
from serving.preprocess import Encoded, Tokenizer

IN_PROPORTION = Bar(1.1, at_least=False)
"""Cost grows in proportion or less, with a tenth for the noise between two arms."""
KEPT = Bar(0.9)
LIMIT_S = 600.0
LENGTH_CALLERS = 8
MODEL_CALLERS = 32
LONG_TEXTS = 128
MIB = 2**20


async def measure(bench: Bench) -> Section:
    """Measure each kind of growth; a figure is the cost of one at many ÷ the cost of one at few, arm by arm."""
    section = Section("growth", "Growth: the cost of one among many ÷ the cost of one among few")
    for part in (_rows, _callers, _lengths, _models):
        await part(bench, section)
    section.notes.append(
        "CPU time is that of the stack alone: gateway, Triton, consumer, Kafka, PostgreSQL. Memory counts shared pages once."
    )
    section.data = {"ratios": {figure.name: list(figure.runs) for figure in section.figures if figure.bar}}
    return section


async def _rows(bench: Bench, section: Section) -> None:
    """Time of a row through job and topic, the same texts ``rows_factor`` times over."""
    plan, built = bench.plan.growth, bench.corpus
    step = max(1, len(built.texts) // plan.rows)
    texts, expected = built.texts[::step][: plan.rows], built.expected[::step][: plan.rows]
    host, port = bench.stack.gateway
    times_ms: dict[tuple[str, int], list[float]] = defaultdict(list)
    topic = TopicDriver(bench.stack.kafka, bench.stack.topics, bench.spec.name, texts, expected)
    async with topic, JobDriver(f"http://{host}:{port}", bench.spec.name) as jobs:
        await topic.run(len(texts), LIMIT_S)
        for number in range(plan.rounds):
            bench.say(f"growth: rows, round {number + 1} of {plan.rounds}")
            for factor in _turns(number, 1, plan.rows_factor):
                rows = len(texts) * factor
                async with bench.watched(section):
                    job = await jobs.run(texts, rows, LIMIT_S)
                    through = await topic.run(rows, LIMIT_S)
                await jobs.check(job, expected)
                times_ms["job", factor].append(1000 / job.rows_per_s)
                times_ms["topic", factor].append(1000 / through.rows_per_s)
        section.check("topic", topic.wrong)
        section.check("job", jobs.wrong)
    for door in ("job", "topic"):
        few, many = times_ms[door, 1], times_ms[door, plan.rows_factor]
        name = f"rows x {plan.rows_factor} ({len(texts)} to {len(texts) * plan.rows_factor}): time of a row by {door}"
        section.figures += [paired_ratio(name, many, few, IN_PROPORTION), Figure(f"{name}, at few", "ms", tuple(few))]


async def _callers(bench: Bench, section: Section) -> None:
    """Throughput, latency and CPU time of a call with ``callers_factor`` times the callers."""
    plan = bench.plan.growth
    counts = (plan.callers, plan.callers * plan.callers_factor)
    runs: dict[int, list[tuple[LoadResult, float]]] = defaultdict(list)
    for number in range(plan.rounds):
        bench.say(f"growth: callers, round {number + 1} of {plan.rounds}")
        for callers in _turns(number, *counts):
            runs[callers].append(await _closed(bench, section, bench.stack, bench.predict, callers, "callers"))
    few, many = (runs[callers] for callers in counts)
    name = f"callers x {plan.callers_factor} ({counts[0]} to {counts[1]})"
    waits = [
        [percentile(run.latencies_ms, 50) / n for run, _ in arm] for n, arm in zip(counts, (few, many), strict=True)
    ]
    section.figures += [
        paired_ratio(f"{name}: requests/s", [run.per_s for run, _ in many], [run.per_s for run, _ in few], KEPT),
        paired_ratio(f"{name}: p50 for each caller there is", waits[1], waits[0], IN_PROPORTION),
        _cost_ratio(f"{name}: CPU time of a call", many, few),
        _cost(f"{name}: CPU time of a call, at few", few),
    ]


async def _lengths(bench: Bench, section: Section) -> None:
    """CPU time of a token in texts ``tokens_factor`` times as long."""
    plan = bench.plan.growth
    sizes = (plan.tokens, plan.tokens * plan.tokens_factor)
    built = [await _of_length(bench, tokens) for tokens in sizes]
    if not all(one.texts for one in built):
        section.notes.append("not measured: texts by length, since too few of these texts are short")
        return
    runs: dict[int, list[tuple[LoadResult, float]]] = defaultdict(list)
    for number in range(plan.rounds):
        bench.say(f"growth: length of texts, round {number + 1} of {plan.rounds}")
        for place in _turns(number, 0, 1):
            target = Predict(bench.stack.gateway, built[place].texts, built[place].expected)
            runs[place].append(await _closed(bench, section, bench.stack, target, LENGTH_CALLERS, "length"))
    means = [sum(row.tokens for row in one.rows) / len(one.rows) for one in built]
    few, many = ([cost_ms / mean for _, cost_ms in runs[place]] for place, mean in enumerate(means))
    name = f"text length x {plan.tokens_factor} ({means[0]:.0f} to {means[1]:.0f} tokens): CPU time of a token"
    section.figures += [
        paired_ratio(name, many, few, IN_PROPORTION), Figure(f"{name}, in short texts", "ms", tuple(few)),
    ]  # fmt: skip


async def _of_length(bench: Bench, tokens: int) -> Corpus:
    """Return texts of about ``tokens`` tokens with their right answers, made of the texts there are."""
    folder = bench.stack.repository / bench.spec.name
    tokenizer = Tokenizer(folder / "tokenizer", bench.spec)
    texts = joined(bench.corpus.texts, bench.corpus.rows, tokenizer.reserve_tokens(""), tokens)[:LONG_TEXTS]
    if not texts:
        return Corpus("", (), (), (), None)
    return await corpus.build(
        Texts(texts, (None,) * len(texts), bench.corpus.source), bench.spec, folder, bench.workers
    )


def joined(texts: Sequence[str], rows: Sequence[Encoded], overhead: int, tokens: int) -> tuple[str, ...]:
    """Join neighbouring texts to ones of at most ``tokens`` tokens and at least three quarters of that.

    ``overhead`` is what an empty text has: prefix and special tokens. What does not fit is left out.
    """
    found, parts, size = [], [], overhead
    for text, row in zip(texts, rows, strict=True):
        if size + row.tokens - overhead <= tokens:
            parts.append(text)
            size += row.tokens - overhead
        if size >= tokens * 0.75:
            found.append(" ".join(parts))
            parts, size = [], overhead
    return tuple(found)


async def _models(bench: Bench, section: Section) -> None:
    """Memory, throughput and CPU time of a call with ``models`` models side by side, in a stack of their own."""
    plan = bench.plan.growth
    names = tuple(copy_name(bench.spec.name, number) for number in range(1, plan.models + 1))
    bench.say(f"growth: a Triton and a gateway of their own for {plan.models} models")
    with copies(bench.stack.repository, bench.spec.name, whole=bench.plan.whole_copies) as served:
        await _named(bench, section, served, names[:1])
        memory = [machine.tree_memory_bytes(served.stack.pids())]
        await served.add(range(2, plan.models + 1), "a lovely little film")
        await _named(bench, section, served, names)
        memory.append(machine.tree_memory_bytes(served.stack.pids()))
        runs: dict[int, list[tuple[LoadResult, float]]] = defaultdict(list)
        for number in range(plan.rounds):
            bench.say(f"growth: models, round {number + 1} of {plan.rounds}")
            for count in _turns(number, 1, plan.models):
                runs[count].append(await _named(bench, section, served, names[:count]))
    few, many = runs[1], runs[plan.models]
    name = f"models x {plan.models}"
    section.figures += [
        Figure(f"{name}: memory of each", "ratio", (memory[1] / plan.models / memory[0],), IN_PROPORTION),
        Figure(f"{name}: memory of Triton and gateway with one", "MiB", (memory[0] / MIB,)),
        Figure(f"{name}: memory of Triton and gateway with all", "MiB", (memory[1] / MIB,)),
        paired_ratio(f"{name}: requests/s", [run.per_s for run, _ in many], [run.per_s for run, _ in few], KEPT),
        _cost_ratio(f"{name}: CPU time of a call", many, few),
    ]


async def _named(bench: Bench, section: Section, served: Copies, names: tuple[str, ...]) -> tuple[LoadResult, float]:
    target = Predict(served.stack.gateway, bench.corpus.texts, bench.corpus.expected, names)
    return await _closed(bench, section, served.stack, target, MODEL_CALLERS, f"{len(names)} models")


async def _closed(
    bench: Bench, section: Section, stack: Endpoints, target: Predict, callers: int, where: str
) -> tuple[LoadResult, float]:
    """Run a closed loop; returns what callers saw, and the stack's CPU time of a call in ms."""
    job = Closed(target, callers, 0.0, bench.plan.growth.seconds, late=True)
    before_s = machine.tree_cpu_s(stack.pids())
    result = await bench.closed_job(section, "gateway", where, job)
    return result, 1000 * (machine.tree_cpu_s(stack.pids()) - before_s) / max(1, result.calls)


def _cost_ratio(name: str, many: Sequence[tuple[LoadResult, float]], few: Sequence[tuple[LoadResult, float]]) -> Figure:
    return paired_ratio(name, [cost_ms for _, cost_ms in many], [cost_ms for _, cost_ms in few], IN_PROPORTION)


def _cost(name: str, runs: Sequence[tuple[LoadResult, float]]) -> Figure:
    return Figure(name, "ms", tuple(cost_ms for _, cost_ms in runs))


def _turns(number: int, first: int, second: int) -> tuple[int, int]:
    """Return both arms; every other round turns their order round."""
    return (first, second) if number % 2 == 0 else (second, first)
