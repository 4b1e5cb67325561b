"""The command: checks the machine, brings a stack up, measures each section, writes the report."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import corpus, entry, machine, peer_figures, report
from benchmarks.bench import Bench, Section
from benchmarks.plan import FULL, LONG, SECTIONS, SHORT, Plan
from benchmarks.sections import cold, gap, growth, herd, job, lanes, mix, open_loop, perf, predict, stream, topic
from benchmarks.stack import Endpoints, own_stack, running_stack
from benchmarks.workers import Workers
from serving.models import ModelSpec
from serving.settings import ModelSettings, StackSettings, TritonSettings, load
from serving.triton_client import TritonClient

MEASURES: Mapping[str, Callable[[Bench], Awaitable[Section]]] = {
    "perf": perf.measure,
    "predict": predict.measure,
    "open": open_loop.measure,
    "topic": topic.measure,
    "job": job.measure,
    "mix": mix.measure,
    "lanes": lanes.measure,
    "gap": gap.measure,
    "growth": growth.measure,
    "herd": herd.measure,
    "cold": cold.measure,
    "stream": stream.measure,
}
RESULTS = Path(__file__).parent / "results"
CACHE = Path(__file__).resolve().parents[1] / ".models-cache"
NAME = "benchmarks"


def main() -> int:
    """Run the report; returns 0 when every answer was right, 1 when not or when it could not run, 2 for wrong usage."""
    arguments = _parse()

    def run(before: dict[str, float]) -> int:
        with _stack(arguments.url) as stack:
            return asyncio.run(_run(arguments, before, stack))

    return entry.measured(NAME, arguments.force, run)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the running stack from outside and write the report."
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--short", action="store_true", help="about a minute: shows that all works, not how fast")
    length.add_argument(
        "--long",
        action="store_true",
        help="the mix at 6 calls/s with 1,500 calls an arm, at least 500 in each of three runs",
    )
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=f"sections: {', '.join(SECTIONS)}"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="folder of the report (benchmarks/results)"
    )
    parser.add_argument("--url", help="measure the running stack behind this gateway instead of one of our own")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    return parser.parse_args()


async def _run(arguments: argparse.Namespace, before: dict[str, float], stack: Endpoints) -> int:
    begin_s = time.monotonic()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    entry.cancel_at_sigterm()
    plan = SHORT if arguments.short else LONG if arguments.long else FULL
    sections: list[Section] = []

    def header() -> report.Header:
        return report.Header(
            started_at, arguments.short, machine.facts(machine.settings()), before, stack.description,
            f"{len(bench.corpus.texts)} of {bench.corpus.source}", bench.corpus.accuracy, time.monotonic() - begin_s,
        )  # fmt: skip

    with Workers() as workers:
        bench = await _prepare(plan, stack, workers)
        for name in SECTIONS:
            if name in arguments.only:
                sections.append(await _measure(name, bench))
                # What was measured is kept, also where a later section ends the run.
                await asyncio.to_thread(_keep, arguments.output, header(), sections)
    return await asyncio.to_thread(_finish, arguments.output, header(), sections)


@contextmanager
def _stack(url: str | None) -> Iterator[Endpoints]:
    if url:
        yield running_stack(url)
        return
    _say("starting a stack of its own")
    with own_stack() as stack:
        yield stack
        _say("stopping the stack")


async def _prepare(plan: Plan, stack: Endpoints, workers: Workers) -> Bench:
    models = load(ModelSettings)
    spec = await _spec(stack, models.default)
    texts = corpus.sst2_texts(plan.rows)
    _say(f"answering {len(texts.texts)} texts of {texts.source} by the model's own file, to know the right answers")
    built = await corpus.build(texts, spec, stack.repository / spec.name, workers)
    watch = machine.CpuWatch(stack.pids)
    return Bench(plan, stack, spec, built, workers, watch, _say, CACHE, load(StackSettings).triton_venv)


async def _spec(stack: Endpoints, name: str) -> ModelSpec:
    """Read the model's config as Triton has loaded it."""
    async with TritonClient(load(TritonSettings).model_copy(update={"grpc_address": stack.triton})) as client:
        config = await client.model_config(name, "")
    return corpus.sentiment_spec(config, stack.repository / name)


async def _measure(name: str, bench: Bench) -> Section:
    begin_s = time.monotonic()
    section = await MEASURES[name](bench)
    section.seconds = time.monotonic() - begin_s
    return section


def _keep(folder: Path, header: report.Header, sections: list[Section]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder, header, sections, ())


def _finish(folder: Path, header: report.Header, sections: list[Section]) -> int:
    # Imported late: the measuring processes need no matplotlib.
    from benchmarks import pictures

    folder.mkdir(parents=True, exist_ok=True)
    names, peers = pictures.draw(sections, folder), peer_figures.read(folder / peer_figures.JSON_NAME)
    if peers:
        peer_figures.draw(peers, folder / peer_figures.PICTURE_NAME)
        names.append(peer_figures.PICTURE_NAME)
    report.write(folder, header, sections, names, peers)
    for line in report.summary(header, sections):
        print(line)
    wrong = sum(len(section.errors) for section in sections)
    print(
        f"bench: {'ok' if not wrong else 'WRONG ANSWERS'}, {header.seconds:.0f} s, report in {_short(folder / report.TABLE_NAME)}"
    )
    return 1 if wrong else 0


def _short(path: Path) -> Path:
    with contextlib.suppress(ValueError):
        return path.absolute().relative_to(Path.cwd())
    return path


def _say(line: str) -> None:
    entry.say(NAME, line)
