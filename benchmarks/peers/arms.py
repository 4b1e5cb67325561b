"""The arms of a run: a peer in its best configuration, Triton asked directly, and Twodoor's own stack."""

import contextlib
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import Direct, Predict, Target
from benchmarks.peers.catalog import TRITON, Peer
from benchmarks.peers.measure import Arm, Session, Trial, topic_as_bulk
from benchmarks.peers.plan import Config, configs
from benchmarks.peers.server import serving
from benchmarks.stack import own_stack
from benchmarks.topic import TopicDriver
from local_stack.stack import Stack
from serving.errors import ConfigError

DRAIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Up:
    """A server that is up: its target, and the roots of its process trees."""

    target: Target
    pids: Callable[[], Sequence[int]]


Serve = Callable[[Config], AbstractAsyncContextManager[Up]]


async def measure_peer(session: Session, peer: Peer) -> Arm:
    """Find a peer's best configuration and measure it."""
    arm = Arm(peer.name, peer.title, versions=peer.versions() if peer.installed else {})
    if not peer.installed:
        arm.errors.append(f"not installed: python -m benchmarks.peers install {peer.name}")
        return arm

    @asynccontextmanager
    async def serve(config: Config) -> AsyncIterator[Up]:
        async with serving(peer, config, session.served) as running:
            yield Up(running.target, lambda: [running.pid])

    await measure_best(session, arm, serve, configs(session.plan, waits=peer.waits))
    return arm


async def measure_triton(session: Session) -> Arm:
    """The same with Triton, which is asked by gRPC with tensors made beforehand."""
    arm = Arm(TRITON, "Triton by gRPC, tokens ready-made")

    @asynccontextmanager
    async def serve(config: Config) -> AsyncIterator[Up]:
        with tempfile.TemporaryDirectory(prefix="peer-") as folder:
            repository = Path(folder) / "models"
            triton_repository(session.served.folder, repository, config)
            with Stack(Path(folder) / "home", services=("triton",), repository=repository) as stack:
                pids = [stack.supervisor_pid, stack.pid("triton")]
                yield Up(direct(session, stack.triton_grpc), lambda: pids)

    await measure_best(session, arm, serve, configs(session.plan, waits=False))
    return arm


def direct(session: Session, address: str) -> Direct:
    """Return Triton itself as a target."""
    spec, corpus = session.served.spec, session.served.corpus
    return Direct(address, spec.name, spec.output, corpus.tensors(spec), corpus.expected)


async def measure_best(session: Session, arm: Arm, serve: Serve, found: Sequence[Config]) -> None:
    """Try every configuration for a moment; then measure the best one. What fails stands in the arm's errors."""
    plan = session.plan
    if len(found) > 1:
        for config in found:
            with _kept(arm, str(config)):
                async with _serving(session, serve, config) as up:
                    session.say(f"{arm.name}: trial of {config}")
                    result = await session.closed(arm, up.target, plan.trial_callers, plan.trial_s, plan.warm_s)
                    arm.trials.append(Trial(config, result.per_s))
        if not arm.trials:
            return
    best = best_of(arm.trials) if arm.trials else found[0]
    arm.config = str(best)
    with _kept(arm, str(best)):
        async with _serving(session, serve, best) as up:
            await session.rounds(arm, up.target, plan.rounds)
            await session.mix(arm, up.target, session.callers_as_bulk(arm, up.target))


def best_of(trials: Sequence[Trial]) -> Config:
    """Return the configuration with the most right answers a second; of equals the first."""
    return max(trials, key=lambda trial: trial.per_s).config


@asynccontextmanager
async def _serving(session: Session, serve: Serve, config: Config) -> AsyncIterator[Up]:
    async with serve(config) as up:
        session.roots = up.pids
        try:
            yield up
        finally:
            session.roots = tuple


@contextlib.contextmanager
def _kept(arm: Arm, where: str) -> Iterator[None]:
    """Keep a failure as the arm's error: the other arms are measured all the same."""
    try:
        yield
    except (ConfigError, OSError, TimeoutError) as exc:
        arm.errors.append(f"{where}: {type(exc).__name__}: {exc}")


def triton_repository(source: Path, repository: Path, config: Config) -> None:
    """Write a repository with nothing but this model, configured as asked."""
    folder = repository / source.name
    shutil.copytree(source, folder)
    file = folder / "config.pbtxt"
    file.write_text(triton_config(file.read_text(encoding="utf-8"), config), encoding="utf-8")


def triton_config(text: str, config: Config) -> str:
    """Return a config.pbtxt with other instances and threads, and with or without dynamic batching.

    Raises ConfigError where the text has not what is to be replaced.
    """
    text = _replaced(r"instance_group \[ \{ count: \d+", f"instance_group [ {{ count: {config.processes}", text)
    threads = r'(key: "intra_op_thread_count" value \{ string_value: )"\d+"'
    text = _replaced(threads, rf'\g<1>"{config.threads}"', text)
    return text if config.batching else _replaced(r"^dynamic_batching \{.*?^\}\n", "", text)


def _replaced(pattern: str, replacement: str, text: str) -> str:
    changed, count = re.subn(pattern, replacement, text, flags=re.MULTILINE | re.DOTALL)
    if count != 1:
        raise ConfigError(f"config.pbtxt has {count} places that match {pattern}")
    return changed


async def measure_stack(session: Session, twodoor: Arm, shipped: Arm, part: int, parts: int) -> None:
    """Measure Twodoor and its own Triton; visit ``part`` of ``parts`` in a run, so each takes its share of the rounds."""
    session.say("starting Twodoor")
    twodoor.config = "as shipped"
    shipped.config = "as Twodoor configures it"
    with _kept(twodoor, "Twodoor's stack"), own_stack() as stack:
        session.roots = stack.pids
        predict = Predict(stack.gateway, session.served.corpus.texts, session.served.corpus.expected)
        rounds = max(1, session.plan.rounds // parts)
        await session.rounds(twodoor, predict, rounds)
        await session.rounds(shipped, direct(session, stack.triton), rounds)
        corpus, plan = session.served.corpus, session.plan
        async with TopicDriver(
            stack.kafka, stack.topics, session.served.spec.name, corpus.texts, corpus.expected
        ) as driver:
            await driver.run(min(len(corpus.texts), 64), 120)
            bulk = topic_as_bulk(twodoor, driver, plan.topic_backlog, DRAIN_S)
            await session.mix(twodoor, predict, bulk, part, parts)
            twodoor.errors += [f"topic: {count} x {what}" for what, count in sorted(driver.wrong.items())]
    session.roots = tuple
