"""A peer's server as a process: started in its own environment, waited for, and ended with all it started."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.corpus import Corpus
from benchmarks.peers.catalog import ROOT, Peer
from benchmarks.peers.plan import Config
from benchmarks.peers.servers.common import VARIABLE, Settings
from benchmarks.peers.wire import PeerTarget
from local_stack.ports import LOOPBACK, free_ports
from serving.errors import ConfigError
from serving.models import ModelSpec

POLL_S = 0.2
STOP_S = 20.0
ATTEMPTS = 2
LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Served:
    """What all servers serve: a model's folder, and the texts that are asked with their right answers."""

    folder: Path
    spec: ModelSpec
    corpus: Corpus


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers rightly."""

    target: PeerTarget
    pid: int
    ready_s: float


@asynccontextmanager
async def serving(peer: Peer, config: Config, served: Served) -> AsyncIterator[Running]:
    """Run a peer's server while the block runs; raises ConfigError with the log's end where it does not come up."""
    # Short: Ray's sockets lie below it, and a socket's path is bounded.
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
        begin_s = time.monotonic()
        process, target = await _started(peer, config, served, Path(folder))
        try:
            yield Running(target, process.pid, time.monotonic() - begin_s)
        finally:
            await asyncio.to_thread(_stop, process)


async def _started(
    peer: Peer, config: Config, served: Served, folder: Path
) -> tuple[subprocess.Popen[bytes], PeerTarget]:
    """Start the server and wait until it answers. Another program may take its port first: then once more."""
    for attempt in range(ATTEMPTS):
        home = folder / str(attempt)
        home.mkdir()
        port, second_port = free_ports(2)
        settings = Settings(
            str(served.folder), str(home), port, config.processes, config.threads, second_port, config.batching,
            served.spec.prompt_prefix, served.spec.max_tokens, max_wait_ms=config.wait_ms or 0,
        )  # fmt: skip
        address, wire = (LOOPBACK, port), peer.wire[config.batching]
        target = PeerTarget(address, wire, peer.health, served.corpus.texts, served.corpus.expected)
        log = folder / f"{attempt}.log"
        process = _start(peer, settings, log)
        try:
            fault = await _fault(peer, process, target)
        except BaseException:
            await asyncio.to_thread(_stop, process)
            raise
        if not fault:
            return process, target
        early = process.poll() is not None
        await asyncio.to_thread(_stop, process)
        if not early or attempt + 1 == ATTEMPTS:
            raise ConfigError(f"{fault}\n{_tail(log)}")
    raise AssertionError("this is a bug: the last attempt returns or raises")


def _start(peer: Peer, settings: Settings, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.pathsep.join([str(peer.python.parent), os.environ.get("PATH", os.defpath)]),
        "LANG": "C.UTF-8",
        "HOME": settings.home,
        "TMPDIR": settings.home,
        "PYTHONPATH": str(ROOT),
        # One tokenizer thread for everybody, as Twodoor's doors have.
        "TOKENIZERS_PARALLELISM": "false",
        VARIABLE: settings.text(),
        # Nothing is reported to anybody, and nothing is bound but loopback.
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOME": str(Path(settings.home) / "bentoml"),
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(peer.python), "-m", *peer.command],
            cwd=settings.home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A group to end it by, but in this session, as Twodoor's own stack: the kernel shares cores out by session.
            process_group=0,
        )


async def _fault(peer: Peer, process: subprocess.Popen[bytes], target: PeerTarget) -> str:
    """Wait for a right answer; returns an empty string, or why none came."""
    seen = "no answer"
    deadline_s = time.monotonic() + peer.start_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            return f"{peer.name} ended with {process.returncode} before it answered"
        try:
            seen = await target.probe()
        except (OSError, TimeoutError) as exc:
            seen = type(exc).__name__
        if not seen:
            return ""
        await asyncio.sleep(POLL_S)
    return f"{peer.name} gave no right answer within {peer.start_s:.0f} s: {seen}"


def _family(pid: int) -> set[psutil.Process]:
    """Return every process below ours, also those that left its process group."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then end what is left: its process group, and those of its family who left the group."""
    family = _family(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=STOP_S)
    for child in family:
        # psutil compares start times, so a pid that was given away is not met.
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(family, timeout=STOP_S)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
