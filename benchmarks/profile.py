"""``python -m benchmarks.profile``: CPU time by stage, of one ``/predict`` at several numbers of callers and of one bulk row.

CPU time and not latency: generator, doors and Triton share the cores, so that what a call costs decides how many there are.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import corpus
from benchmarks.callers import HttpConnection, get
from benchmarks.corpus import Corpus
from benchmarks.jobs import Closed, Direct, Predict, run_closed
from benchmarks.load import LoadResult
from benchmarks.processes import end
from benchmarks.sampler import Sampled
from benchmarks.stack import START_TIMEOUT_S
from benchmarks.stats import percentile
from benchmarks.topic import TopicDriver
from benchmarks.workers import Workers
from local_stack.ports import free_ports
from local_stack.stack import Stack
from local_stack.state import StateFolder
from serving.models import ModelSpec
from serving.settings import KafkaSettings, ModelSettings, TritonSettings, load
from serving.triton_client import TritonClient

READY_S = 60.0
TOP_FUNCTIONS = 12
WARM_S = 1.0


@dataclass(slots=True)
class Cost:
    """CPU seconds of every process in one window, and how much was done in it."""

    done: int
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    sampled: Sampled | None = None

    def lines(self, unit: str) -> Iterator[str]:
        """Yield the table of this window: microseconds of CPU time for one call or row."""

        def line(name: str, seconds: float) -> str:
            return f"  {name:<42}{seconds / self.done * 1e6:>9.0f} µs"

        yield f"  {'CPU time of one ' + unit:<42}"
        for name, seconds in sorted(self.cpu_s.items(), key=lambda item: -item[1]):
            yield line(name, seconds)
        if self.sampled is None:
            return
        total = sum(self.sampled["stages"].values()) or 1
        main_s = self.sampled["main_cpu_s"]
        yield "  the door's main thread by stage"
        for name, count in sorted(self.sampled["stages"].items(), key=lambda item: -item[1]):
            yield line(f"  {name}", main_s * count / total)
        yield line("  other threads (gRPC's, offloaded work)", self.sampled["all_cpu_s"] - main_s)
        yield "  its functions, own time"
        for name, count in Counter(self.sampled["functions"]).most_common(TOP_FUNCTIONS):
            yield line(f"  {name}", main_s * count / total)


class Door:
    """One door in the sampler, over a running stack."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], port: int) -> None:
        self._file, self._log = folder / f"{name}.json", folder / f"{name}.log"
        self._port = port
        self._command = [sys.executable, "-m", "benchmarks.sampler", str(self._file), name]
        self._environment = {**os.environ, **environment}

    @contextlib.contextmanager
    def running(self) -> Iterator["Door"]:
        """Run it while the block runs."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
            try:
                yield self
            finally:
                end(self._process, 20)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it says that Triton is there; raises TimeoutError with its log's end."""
        connection = HttpConnection("127.0.0.1", self._port)
        try:
            async with asyncio.timeout(READY_S):
                while not await self._says_ready(connection):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise TimeoutError(self._log.read_text(errors="replace")[-2000:]) from None
        finally:
            await connection.close()

    async def _says_ready(self, connection: HttpConnection) -> bool:
        try:
            status, body = await connection.send(get("/readyz", f"127.0.0.1:{self._port}"))
        except OSError:
            return False
        return status == 200 and b"down" not in body

    def begin(self) -> None:
        """Start a count."""
        self._process.send_signal(signal.SIGUSR1)

    async def end(self) -> Sampled:
        """End the count and return it."""
        self._file.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR2)
        async with asyncio.timeout(READY_S):
            while not self._file.exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.02)
        content: Sampled = json.loads(self._file.read_text())
        return content


def cpu_by_process(stack: Stack, doors: Mapping[str, int]) -> dict[str, float]:
    """Return CPU seconds used so far, by the part of the stack they belong to."""
    used: defaultdict[str, float] = defaultdict(float)
    for name, pid in doors.items():
        used[name] = own_s(psutil.Process(pid))
    record = StateFolder(stack.home).read()
    for service in record.services if record else ():
        if service.process is None:
            continue
        root = psutil.Process(service.process.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                used[label(service.name, process)] += own_s(process)
    return dict(used)


def since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return what was used between two moments."""
    return {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}


def label(service: str, process: psutil.Process) -> str:
    """Return what a process of a service is: Triton's front or one of its models' processes, else the service."""
    if service != "triton":
        return service
    return "triton: model process" if "stub" in process.name() else "triton: front"


def own_s(process: psutil.Process) -> float:
    """Return the CPU seconds of one process."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Profile:
    """One stack, its texts and the processes that make the load."""

    def __init__(self, stack: Stack, built: Corpus, spec: ModelSpec, workers: Workers, seconds: float) -> None:
        self._stack, self._built, self._spec = stack, built, spec
        self._workers, self._seconds = workers, seconds

    async def predict(self, callers: int, door: Door, address: tuple[str, int]) -> None:
        """Print what one call costs in a closed loop through the gateway, and straight to Triton."""
        gateway = Predict(address, self._built.texts, self._built.expected)
        tensors = self._built.tensors(self._spec)
        direct = Direct(self._stack.triton_grpc, self._spec.name, self._spec.output, tensors, self._built.expected)
        result, cost = await self._window(callers, gateway, door)
        straight, straight_cost = await self._window(callers, direct, None)
        say(f"\n/predict, {callers} callers: {told(result)}; straight to Triton: {told(straight)}")
        say(f"  ratio of requests/s {result.per_s / straight.per_s:.2f}")
        say("\n".join(cost.lines("call")))
        say("  straight to Triton")
        say("\n".join(straight_cost.lines("call")))

    async def _window(self, callers: int, target: Predict | Direct, door: Door | None) -> tuple[LoadResult, Cost]:
        """Run a warm-up and then a window of a closed loop, and count in the window."""
        worker = type(target).__name__
        await self._workers.run(worker, run_closed, Closed(target, callers, 0.0, WARM_S), 60)
        doors = {"gateway": door.pid} if door else {}
        before = cpu_by_process(self._stack, doors)
        if door:
            door.begin()
        result = await self._workers.run(worker, run_closed, Closed(target, callers, 0.0, self._seconds), 90)
        sampled = await door.end() if door else None
        used = since(before, cpu_by_process(self._stack, doors)) | {"load generator": result.cpu_s}
        return result, Cost(max(1, result.calls), used, sampled)

    async def topic(self, rows: int, door: Door) -> None:
        """Print what one row costs through the topic."""
        kafka = load(KafkaSettings)
        topics = (kafka.requests_topic, kafka.results_topic)
        async with TopicDriver(
            self._stack.kafka, topics, self._spec.name, self._built.texts, self._built.expected
        ) as driver:
            await driver.run(max(64, rows // 8), READY_S)
            before = cpu_by_process(self._stack, {"consumer": door.pid})
            door.begin()
            run = await driver.run(rows, 10 * READY_S)
            sampled = await door.end()
            cost = Cost(rows, since(before, cpu_by_process(self._stack, {"consumer": door.pid})), sampled)
        wrong = f", WRONG: {dict(driver.wrong)}" if driver.wrong else ""
        say(f"\ntopic, {rows} rows: {run.rows_per_s:.0f} rows/s{wrong}")
        say("\n".join(cost.lines("row")))


def told(result: LoadResult) -> str:
    """Return a loop's figures in one line."""
    p50, p99 = (percentile(result.latencies_ms, percent) for percent in (50, 99))
    wrong = f", WRONG: {dict(result.wrong)}" if result.wrong else ""
    return f"{result.per_s:.0f} requests/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms{wrong}"


async def run(arguments: argparse.Namespace, stack: Stack, folder: Path) -> None:
    """Measure what was asked for."""
    models = load(ModelSettings)
    triton = load(TritonSettings).model_copy(update={"grpc_address": stack.triton_grpc})
    async with TritonClient(triton) as client:
        config = await client.model_config(models.default, "")
    repository = models.repository.absolute()
    spec = corpus.read_spec(config, repository / models.default)
    texts = corpus.sst2_texts(arguments.texts)
    with Workers() as workers:
        built = await corpus.build(texts, spec, repository / spec.name, workers)
        profile = Profile(stack, built, spec, workers, arguments.seconds)
        (port,) = free_ports(1)
        environment = {**stack.environment, "TWODOOR_GATEWAY_PORT": str(port), "TWODOOR_CONSUMER_PORT": str(port)}
        if arguments.callers:
            with Door("gateway", folder, environment, port).running() as door:
                await door.ready()
                for callers in arguments.callers:
                    await profile.predict(callers, door, ("127.0.0.1", port))
        if arguments.rows:
            with Door("batch_consumer", folder, environment, port).running() as door:
                await door.ready()
                await profile.topic(arguments.rows, door)


def main() -> None:
    """Bring a stack up, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--callers", type=int, nargs="*", default=[1, 32, 128], help="none = no /predict")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one window")
    parser.add_argument("--rows", type=int, default=3_000, help="rows through the topic; 0 = none")
    parser.add_argument("--texts", type=int, default=1_800)
    arguments = parser.parse_args()
    services = ("kafka", "triton") if arguments.rows else ("triton",)
    with tempfile.TemporaryDirectory(prefix="twodoor-profile-") as home:
        begin_s = time.monotonic()
        patient = {"TWODOOR_STACK_START_TIMEOUT_S": str(START_TIMEOUT_S)}
        stack = Stack(
            Path(home) / "home", services, load(ModelSettings).repository,
            environment=patient, start_timeout_s=START_TIMEOUT_S + 10,
        )  # fmt: skip
        with stack:
            asyncio.run(run(arguments, stack, Path(home)))
        say(f"\n{time.monotonic() - begin_s:.0f} s; load average {os.getloadavg()[0]:.1f}")


def say(line: str) -> None:
    """Print."""
    print(line, flush=True)


if __name__ == "__main__":
    main()
