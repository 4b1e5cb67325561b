"""The command: checks the machine, measures the chosen servers one after another, writes the report."""

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import corpus, entry, machine
from benchmarks.peers import loop, report
from benchmarks.peers.arms import measure_peer, measure_stack, measure_triton
from benchmarks.peers.catalog import ENVIRONMENTS, LOOP, NAMES, PEERS, TRITON, TWODOOR
from benchmarks.peers.install import install
from benchmarks.peers.measure import Arm, Session
from benchmarks.peers.plan import FULL, SHORT
from benchmarks.peers.server import Served
from benchmarks.run import RESULTS
from benchmarks.workers import Workers
from serving.errors import ConfigError
from serving.settings import ModelSettings, load
from serving.triton_client import parse_config

COMMAND = "peers"
BY_NAME = {peer.name: peer for peer in PEERS}


def main() -> int:
    """Measure or install; returns 0 when all went well, 1 for a wrong answer or a server that failed, 2 for wrong usage."""
    arguments = _parse()
    if arguments.command == "install":
        return install(arguments.names)
    return entry.measured(COMMAND, arguments.force, lambda before: asyncio.run(_run(arguments, before)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Measure other servers and Twodoor on the same model file."
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--short", action="store_true", help="shows that all works, not how fast")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="folder of peers.json and peers.md")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine too")
    commands = parser.add_subparsers(dest="command", metavar="install")
    installing = commands.add_parser("install", help="make the peers' environments in .venv-peers")
    installing.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(ENVIRONMENTS)}; all where none is named"
    )
    arguments = parser.parse_args()
    if arguments.command == "install" and (unknown := set(arguments.names) - set(ENVIRONMENTS)):
        parser.error(f"no environment is called {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    return arguments


async def _run(arguments: argparse.Namespace, before: dict[str, float]) -> int:
    begin_s = time.monotonic()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    entry.cancel_at_sigterm()
    plan = SHORT if arguments.short else FULL
    with Workers() as workers:
        session = Session(plan, await _served(plan.texts, workers), workers, _say)
        # Started before anything is measured.
        await asyncio.gather(*(workers.run(name, os.nice, 0, 60) for name in ("calls", "bulk")))
        arms = await _arms(session, arguments.only)
    built = session.served.corpus
    run = report.Run(
        started_at, time.monotonic() - begin_s, arguments.short, machine.facts(machine.settings()), before,
        f"{len(built.texts)} texts of {built.source}", plan,
    )  # fmt: skip
    await asyncio.to_thread(report.write, arguments.output, run, arms)
    print(report.markdown(run, arms))
    wrong = sum(len(arm.errors) for arm in arms)
    print(f"peers: {'ok' if not wrong else 'FAILED'}, {run.seconds:.0f} s, {arguments.output / report.TABLE_NAME}")
    return 1 if wrong else 0


async def _served(texts: int, workers: Workers) -> Served:
    """Read the default model's config and answer every text by its file in plain ONNX Runtime."""
    models = load(ModelSettings)
    folder = models.repository.absolute() / models.default
    config = folder / "config.pbtxt"
    if not config.is_file():
        raise ConfigError(f"no model at {folder}: make setup")
    spec = corpus.sentiment_spec(parse_config(config.read_text(encoding="utf-8")), folder)
    found = corpus.sst2_texts(texts)
    return Served(folder, spec, await corpus.build(found, spec, folder, workers))


async def _arms(session: Session, names: Sequence[str]) -> list[Arm]:
    """Measure the chosen peers; Twodoor, its own Triton and the plain loop at the begin, in the middle and at the end."""
    twodoor, shipped = Arm(TWODOOR, "Twodoor"), Arm("triton-shipped", "Triton by gRPC, Twodoor's own instance")
    plain = Arm(LOOP, "plain ONNX Runtime loop")
    visits = iter(range(session.plan.visits))

    async def visit() -> None:
        number = next(visits, None)
        if number is not None and TWODOOR in names:
            await measure_stack(session, twodoor, shipped, number, session.plan.visits)
        if number is not None and LOOP in names:
            await loop.measure(session, plain)

    chosen = [name for name in (*BY_NAME, TRITON) if name in names]
    arms: list[Arm] = []
    await visit()
    for number, name in enumerate(chosen):
        arms.append(await (measure_triton(session) if name == TRITON else measure_peer(session, BY_NAME[name])))
        if number + 1 == (len(chosen) + 1) // 2:
            await visit()
    await visit()
    return [*([twodoor, shipped] if TWODOOR in names else []), *arms, *([plain] if LOOP in names else [])]


def _say(line: str) -> None:
    entry.say(COMMAND, line)
