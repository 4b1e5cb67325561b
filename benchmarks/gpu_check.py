"""`python -m benchmarks.gpu_check`: the stack with FP16 models on an NVIDIA GPU, in at most 8 minutes of its time.

It prints `/predict` in a closed loop, rows/s through topic and job, and the mix with `bulk_batch_ms` swept, and what was
left out. `--dry-run` needs no GPU: it checks every part of that on the CPU, with the real Triton and the gateway.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks import corpus, gpu_bulk, gpu_dry, gpu_machine, gpu_models
from benchmarks.bench import Bench, Section
from benchmarks.gpu_machine import Backend
from benchmarks.gpu_models import MODEL, Models
from benchmarks.machine import CpuWatch
from benchmarks.plan import FULL, MixPlan, Plan
from benchmarks.processes import end
from benchmarks.run import CACHE
from benchmarks.sections import mix, predict
from benchmarks.stack import Endpoints, endpoints
from benchmarks.stats import number
from benchmarks.workers import Workers
from local_stack.ask import client, parts_down
from local_stack.process import wrapped
from local_stack.stack import Stack
from serving.errors import ConfigError, TwodoorError
from serving.models import ModelSpec
from serving.settings import ConsumerSettings, KafkaSettings, StackSettings, TritonSettings, load
from serving.triton_client import TritonClient

GPU_S = 480.0
START_TIMEOUT_S = 150.0
STOP_S = 25.0
"""Kept for the end of everything: a phase that would not leave it is not begun."""
CONSUMER_S = 30.0
SWEEP_MS = (25, 5, 100, 10, 50, 0)
"""The values of `bulk_batch_ms`, the most telling first; 0 = no bound."""
CALLERS = (32, 1, 128, 8)
PLAN = replace(
    FULL,
    rows=2_000,
    predict_rounds=1,
    predict_s=4.0,
    topic_rounds=2,
    job_passes=5,
    mixes=(MixPlan(20.0, runs=1, rounds=1, seconds=10.0, bulk_s=8.0),),
    mix_backlog=8_000,
    mix_idle_s=1.0,
)


@dataclass(slots=True)
class Budget:
    """The GPU's time: phases take from it, and one that does not fit is named and not begun."""

    limit_s: float = GPU_S
    begin_s: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        """What phases may still take."""
        return self.limit_s - STOP_S - (time.monotonic() - self.begin_s)

    async def run(self, name: str, needs_s: float, work: Callable[[], Awaitable[Section]]) -> None:
        """Run a phase if it fits; one that takes longer than all that is left is ended."""
        if self.left_s < needs_s:
            self.left_out.append(f"{name}: it needs about {needs_s:.0f} s and {max(0.0, self.left_s):.0f} s were left")
            return
        say(f"{name}, {self.left_s:.0f} s left")
        try:
            async with asyncio.timeout(self.left_s):
                section = await work()
        except TimeoutError:
            self.left_out.append(f"{name}: not done when the time was over")
            return
        self.sections.append(section)
        for figure in section.figures:
            print(f"{name}: {figure.name}: {number(figure.median)} {figure.unit}", flush=True)


def main() -> int:
    """Run the check; returns 0 when all was right, 1 when something was wrong or missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="no GPU: check every part on the CPU, in seconds")
    parser.add_argument("--seconds", type=float, default=GPU_S, help="most GPU time (%(default)g)")
    arguments = parser.parse_args()
    try:
        found = gpu_machine.discover(load(StackSettings).triton_venv)
        for line in found.lines:
            say(line)
        models = gpu_models.build_models(CACHE / "gpu_check", CACHE, say)
        spec = gpu_models.check_configs(models.fp16)
        if arguments.dry_run:
            return asyncio.run(gpu_dry.run(models, spec, SWEEP_MS, say))
        if found.gpu is None or found.backend is None:
            raise ConfigError("no GPU that a Triton here can use: --dry-run checks what can be checked without")
        return _measure(models, spec, found.backend, arguments.seconds)
    except TwodoorError as exc:
        say(str(exc))
        return 1


def _measure(models: Models, spec: ModelSpec, backend: Backend, seconds: float) -> int:
    say("answering the texts by the FP32 file on the CPU, to know the right answers")
    with Workers() as workers:
        texts = asyncio.run(_texts(models, spec, workers))
    say(f"starting {backend.title}")
    budget = Budget(seconds)
    with _stack(models.fp16, backend) as stack, Workers() as workers:
        asyncio.run(_phases(budget, stack, models, texts, workers, backend))
    wrong = [f"{section.title}: {error}" for section in budget.sections for error in section.errors]
    for line in [*(f"left out: {name}" for name in budget.left_out), *(f"wrong: {line}" for line in wrong)]:
        print(line)
    used_s = time.monotonic() - budget.begin_s
    print(f"gpu check: {'WRONG' if wrong else 'ok'}, {used_s:.0f} s of at most {seconds:.0f} s of GPU time")
    return 1 if wrong or not budget.sections else 0


async def _texts(models: Models, spec: ModelSpec, workers: Workers) -> corpus.Corpus:
    read = corpus.sst2_texts(PLAN.rows)
    return gpu_models.as_half(await corpus.build(read, spec, models.fp32 / MODEL, workers))


@contextmanager
def _stack(repository: Path, backend: Backend) -> Iterator[Stack]:
    """Start everything but the consumer, which is started anew for each value of the sweep."""
    names = ("postgres", "kafka", *(() if backend.native else ("triton",)), "gateway")
    settings = {
        "TWODOOR_MODELS_DEFAULT": MODEL,
        "TWODOOR_STACK_TRITON_STAGED_LOAD": "false",
        "TWODOOR_STACK_START_TIMEOUT_S": str(START_TIMEOUT_S),
    }
    with tempfile.TemporaryDirectory(prefix="twodoor-gpu-") as folder:
        stack = Stack(Path(folder) / "home", names, repository, environment=settings, start_timeout_s=START_TIMEOUT_S)
        with _native(backend, repository, stack), stack:
            yield stack


@contextmanager
def _native(backend: Backend, repository: Path, stack: Stack) -> Iterator[None]:
    if backend.native is None:
        yield
        return
    process = subprocess.Popen(wrapped(backend.command(repository, stack.environment), 0), process_group=0)
    try:
        yield
    finally:
        end(process, STOP_S)


async def _phases(
    budget: Budget, stack: Stack, models: Models, texts: corpus.Corpus, workers: Workers, backend: Backend
) -> None:
    ends = endpoints(stack, models.fp16, load(KafkaSettings))
    spec = await _loaded_spec(ends)
    if not spec.on_gpu:
        raise ConfigError(f"Triton has put {MODEL} on the CPU")
    if backend.native is None and (found := gpu_machine.cpu_instances(stack.log_path("triton").read_text())):
        raise ConfigError(
            f"ONNX Runtime could not use the GPU for {', '.join(found)}: see the warnings of Triton's log"
        )

    def bench(plan: Plan, pids: Callable[[], list[int]] = ends.pids) -> Bench:
        return Bench(plan, ends, spec, texts, workers, CpuWatch(pids), say, CACHE, load(StackSettings).triton_venv)

    for callers in CALLERS:
        plan = replace(PLAN, callers=(callers,))
        await budget.run(f"/predict, {callers} callers", 20, partial(predict.measure, bench(plan)))

    async def with_consumer(batch_ms: int, measure: Callable[[Bench], Awaitable[Section]]) -> Section:
        async with _consumer(stack, batch_ms) as pid:
            return await measure(bench(PLAN, lambda: [*ends.pids(), pid]))

    await budget.run("topic and job", 60, partial(with_consumer, SWEEP_MS[0], gpu_bulk.measure))
    for batch_ms in SWEEP_MS:
        await budget.run(f"mix, bulk_batch_ms {batch_ms}", 50, partial(with_consumer, batch_ms, mix.measure))


async def _loaded_spec(ends: Endpoints) -> ModelSpec:
    """Wait for the model, and read its config as Triton has resolved it."""
    settings = load(TritonSettings).model_copy(update={"grpc_address": ends.triton})
    async with TritonClient(settings) as triton, asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                return corpus.read_spec(await triton.model_config(MODEL, ""), ends.repository / MODEL, "1")
            except ConfigError:
                raise
            except TwodoorError:
                await asyncio.sleep(0.5)


@asynccontextmanager
async def _consumer(stack: Stack, batch_ms: int) -> AsyncIterator[int]:
    """Run a consumer with one value of ``bulk_batch_ms``; gives its pid once it sees every part."""
    process = _start_consumer(stack, batch_ms)
    try:
        url = f"http://127.0.0.1:{stack.environment['TWODOOR_CONSUMER_PORT']}/readyz"
        async with client() as http, asyncio.timeout(CONSUMER_S):
            while await parts_down(http, url):
                if process.poll() is not None:
                    raise ConfigError(f"the consumer ended with exit code {process.returncode}")
                await asyncio.sleep(0.1)
        yield process.pid
    finally:
        await asyncio.to_thread(end, process, STOP_S)


def _start_consumer(stack: Stack, batch_ms: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, **stack.environment, "TWODOOR_CONSUMER_BULK_BATCH_MS": str(batch_ms)}
    command = wrapped([sys.executable, "-m", "batch_consumer"], load(ConsumerSettings).nice)
    with (stack.home / "consumer.log").open("ab") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, process_group=0)


def say(line: str) -> None:
    """Print one line at once."""
    print(f"gpu check: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
