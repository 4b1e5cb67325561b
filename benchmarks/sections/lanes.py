"""Both ways to share one processor: two lanes, and one model whose queue lets callers go first. Measured by turns."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.bench import Bench, Section
from benchmarks.copies import quick
from benchmarks.machine import CpuWatch
from benchmarks.sections.mix import Run, one_run
from benchmarks.sections.topic import driver
from benchmarks.stack import START_TIMEOUT_S, Endpoints, endpoints
from benchmarks.stats import Figure, paired_ratio
from local_stack.stack import Stack
from local_stack.state import ORDER
from model_builder.config import ModelConfig, render
from serving.models import ModelSpec
from serving.settings import KafkaSettings, load

TWO_LANES, ONE_QUEUE = "two lanes", "one queue with priorities"


async def measure(bench: Bench) -> Section:
    """In each run both ways: calls alone, then the topic with and without calls (A-B-A-B)."""
    section = Section("lanes", "Bulk on instances of its own, and behind callers in the queue of one model")
    mix = bench.plan.lanes
    runs: dict[str, list[Run]] = {TWO_LANES: [], ONE_QUEUE: []}
    bench.say("lanes: starting a stack whose model has no twin")
    with _one_queue(bench) as other:
        both = CpuWatch(lambda: [*bench.stack.pids(), *other.pids()])
        ways = {
            TWO_LANES: replace(bench, watch=both),
            ONE_QUEUE: replace(bench, watch=both, stack=other),
        }
        async with driver(ways[TWO_LANES]) as lanes, driver(ways[ONE_QUEUE]) as queue:
            drivers = {TWO_LANES: lanes, ONE_QUEUE: queue}
            for one in drivers.values():
                await one.run(min(len(bench.corpus.texts), 64), 120)
            for number in range(mix.runs):
                for way in ways if number % 2 == 0 else reversed(ways):
                    bench.say(f"lanes: {way}")
                    runs[way].append(await one_run(ways[way], section, drivers[way], mix, number))
            for way, one in drivers.items():
                section.check(f"topic, {way}", one.wrong)
    for way, measured in runs.items():
        section.figures += _figures(way, measured)
    section.notes = [
        f"{mix.calls_per_s:g} calls/s; each way in a stack of its own, the other one idle meanwhile.",
        "With one queue a call waits for the micro-batches that run, so they are kept short: `bulk_batch_ms` of the model.",
    ]
    section.data = {way: _data(measured) for way, measured in runs.items()}
    return section


def _figures(way: str, runs: list[Run]) -> list[Figure]:
    figures = []
    for percent in (50, 99):
        alone, beside = ([run.ms(arm, percent) for run in runs] for arm in ("alone", "beside"))
        figures += [
            Figure(f"{way}: p{percent} alone", "ms", tuple(alone)),
            Figure(f"{way}: p{percent} beside the topic", "ms", tuple(beside)),
            paired_ratio(f"{way}: p{percent} beside the topic ÷ alone", beside, alone),
        ]
    topic, shared = [run.topic_alone.per_s for run in runs], [run.topic_shared.per_s for run in runs]
    return [
        *figures,
        Figure(f"{way}: topic alone", "rows/s", tuple(topic)),
        Figure(f"{way}: topic with calls", "rows/s", tuple(shared)),
        Figure(f"{way}: topic with calls ÷ alone, rows/s", "ratio", tuple(run.kept for run in runs)),
    ]


def _data(runs: list[Run]) -> Mapping[str, list[float]]:
    return {
        **{
            f"p{percent}_{arm}": [run.ms(arm, percent) for run in runs]
            for percent in (50, 99)
            for arm in ("alone", "beside")
        },
        "topic_alone": [run.topic_alone.per_s for run in runs],
        "topic_shared": [run.topic_shared.per_s for run in runs],
    }


@contextmanager
def _one_queue(bench: Bench) -> Iterator[Endpoints]:
    """Start a stack with the same model, but no twin; stop it at the end. To be entered on the main thread."""
    with tempfile.TemporaryDirectory(prefix="twodoor-lanes-") as folder:
        repository = Path(folder) / "repository"
        write_without_twin(
            bench.stack.repository / bench.spec.name,
            repository / bench.spec.name,
            bench.spec,
            whole=bench.plan.whole_copies,
        )
        stack = Stack(
            Path(folder) / "home",
            # In the full run the same services as beside it, so that both ways have the same idle neighbours.
            services=[name for name in ORDER if bench.plan.whole_copies or name != "postgres"],
            repository=repository,
            environment={
                "TWODOOR_STACK_START_TIMEOUT_S": str(START_TIMEOUT_S),
                "TWODOOR_MODELS_DEFAULT": bench.spec.name,
            },
            start_timeout_s=START_TIMEOUT_S + 10,
        )
        with stack:
            yield endpoints(stack, repository, load(KafkaSettings))


def write_without_twin(source: Path, target: Path, spec: ModelSpec, *, whole: bool = True) -> None:
    """Copy a model's folder, with a config by which it serves both lanes itself.

    Not ``whole``: without warm-up and with one instance, so that it starts in a fraction of the time.
    """
    shutil.copytree(source, target)
    config = ModelConfig(
        name=spec.name,
        task="classify",
        output=spec.output,
        output_size=spec.output_size,
        max_tokens=spec.max_tokens,
        prompt_prefix=spec.prompt_prefix,
        tokenizer_sha256=spec.tokenizer_sha256,
        labels=spec.labels,
        cores=spec.instances,
        for_gpu=spec.on_gpu,
        has_twin=False,
    )
    text = render(config, bulk=False)
    (target / "config.pbtxt").write_text(text if whole else quick(text), encoding="utf-8")
