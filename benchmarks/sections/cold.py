"""Cold starts: the time from the command to the first right answer, by phase, before and after what was overlapped."""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.bench import Bench, Section
from benchmarks.cold_start import Question, cold_stack
from benchmarks.copies import write_copy
from benchmarks.stats import Figure, paired_ratio
from serving.errors import ConfigError

TOTAL = "from the command to the first right answer"
ARMS = {
    "overlapped": {"TWODOOR_STACK_TRITON_STAGED_LOAD": "true"},
    "all models first": {"TWODOOR_STACK_TRITON_STAGED_LOAD": "false"},
}
ALONE = {"gateway": "the gateway alone, Triton warm", "triton": "Triton alone, gateway warm"}

Runs = dict[str, list[float]]


async def measure(bench: Bench) -> Section:
    """Start Triton and gateway anew in each round, once for each arm; then each of them alone."""
    section = Section("cold", "Cold start: from process start to the first right answer of `/predict`")
    starts: dict[str, Runs] = {arm: defaultdict(list) for arm in list(ARMS)[: bench.plan.cold.arms]}
    alone: Runs = defaultdict(list)
    for number in range(bench.plan.cold.rounds):
        bench.say(f"cold: round {number + 1} of {bench.plan.cold.rounds}")
        for arm in list(starts) if number % 2 == 0 else reversed(list(starts)):
            async with bench.watched(section):
                await _round(
                    bench, section, arm, starts[arm], alone if arm == "overlapped" and bench.plan.cold.alone else None
                )
    section.figures = _figures(starts, alone)
    section.notes = [
        "All programs' files were in the page cache: what is measured is processes, not the disk.",
        (
            "Overlapped: Triton starts with the default model and opens its ports; the other models and the bulk twins load "
            "while it answers. Gateway and Triton start side by side, and tokenizers are read meanwhile."
        ),
        "The whole stack of the report was idle beside it.",
    ]
    section.data = {arm: dict(runs) for arm, runs in starts.items()} | {"alone": dict(alone)}
    return section


async def _round(bench: Bench, section: Section, arm: str, runs: Runs, alone: Runs | None) -> None:
    question = Question(bench.corpus.texts[0], bench.corpus.expected[0])
    try:
        with _repository(bench) as repository:
            async with cold_stack(repository, bench.spec.name, question, ARMS[arm]) as cold:
                for phase, seconds in (await cold.start()).items():
                    runs[phase].append(seconds)
                if alone is not None:
                    for service in ALONE:
                        alone[service].append(await cold.restart(service))
    except (ConfigError, ValueError, TimeoutError) as exc:
        section.errors.append(f"{arm}: {exc}")


@contextmanager
def _repository(bench: Bench) -> Iterator[Path]:
    """Give the report's repository; in the short run one with nothing but the default model, which starts at once."""
    if bench.plan.whole_copies:
        yield bench.stack.repository
        return
    with tempfile.TemporaryDirectory(prefix="twodoor-cold-") as folder:
        write_copy(bench.stack.repository, bench.spec.name, Path(folder), bench.spec.name, whole=False)
        yield Path(folder)


def _figures(starts: dict[str, Runs], alone: Runs) -> list[Figure]:
    figures = [
        Figure(f"{arm}: {phase}", "s", tuple(values)) for arm, runs in starts.items() for phase, values in runs.items()
    ]
    figures = [replace(f, headline=True) if f.name == f"overlapped: {TOTAL}" else f for f in figures]
    if len(starts) > 1:
        first, second = (runs[TOTAL] for runs in starts.values())
        if len(first) == len(second):
            figures.append(paired_ratio("overlapped ÷ all models first, to the first right answer", first, second))
    return figures + [Figure(name, "s", tuple(alone[service])) for service, name in ALONE.items() if service in alone]
