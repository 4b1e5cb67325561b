"""The GPU check without a GPU: each of its parts on the CPU, with the real Triton and the real gateway."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import gpu_models
from benchmarks.gpu_machine import Backend
from benchmarks.gpu_models import MODEL, Models
from benchmarks.jobs import Predict
from benchmarks.load import closed_loop
from benchmarks.stack import endpoints
from local_stack.stack import Stack
from serving.errors import ConfigError
from serving.models import ModelSpec
from serving.settings import ConsumerSettings, KafkaSettings, env_names, load
from twodoor.demo import sentences

ROWS = 16
CALLERS, LOOP_S = 2, 0.5
CALLS_LIMIT_S = 30.0
SETTING = "TWODOOR_CONSUMER_BULK_BATCH_MS"


async def run(models: Models, spec: ModelSpec, sweep_ms: Sequence[int], say: Callable[[str], None]) -> int:
    """Check the sweep's setting, the configs, both Tritons' command lines, and the FP16 model's answers; raises ConfigError."""
    check_sweep(sweep_ms)
    labelled = sentences.load()[:: max(1, len(sentences.load()) // ROWS)][:ROWS]
    texts = gpu_models.reference(models.fp32, spec, tuple(row.text for row in labelled))
    with tempfile.TemporaryDirectory(prefix="twodoor-gpu-") as folder:
        repository = Path(folder) / "repository"
        gpu_models.cpu_form(models.fp16, repository)
        stack = Stack(
            Path(folder) / "home", ("triton", "gateway"), repository, environment={"TWODOOR_MODELS_DEFAULT": MODEL}
        )
        check_native_command(repository, stack)
        with stack:
            say("Triton takes the GPU's configs, in both lanes; asking for answers")
            ends = endpoints(stack, repository, load(KafkaSettings))
            wrong = await _answers(Predict(ends.gateway, texts.texts, texts.expected))
    for what, count in wrong.items():
        say(f"wrong: {count} x {what}")
    say("dry run: WRONG" if wrong else f"dry run: ok, {len(texts.texts)} answers of FP16 as by FP32")
    return 1 if wrong else 0


def check_sweep(sweep_ms: Sequence[int]) -> None:
    """Raise ConfigError unless the consumer takes every value of the sweep."""
    fields = {variable: name for name, variable in env_names(ConsumerSettings).items()}
    if SETTING not in fields:
        raise ConfigError(f"the consumer has no setting {SETTING}")
    for value in sweep_ms:
        ConsumerSettings.model_validate({fields[SETTING]: str(value)})


def check_native_command(repository: Path, stack: Stack) -> None:
    """Raise ConfigError unless the command for NVIDIA's own Triton loads both models of the repository."""
    command = Backend("native", Path("/opt/tritonserver")).command(repository, stack.environment)
    missing = {f"--load-model={name}" for name in (MODEL, f"{MODEL}_bulk")} - set(command)
    if missing:
        raise ConfigError(f"the native Triton would not get {', '.join(sorted(missing))}")


async def _answers(target: Predict) -> Counter[str]:
    """Ask for each text once, then in a short closed loop; returns what was wrong."""
    wrong: Counter[str] = Counter()
    async with asyncio.timeout(CALLS_LIMIT_S), target.calls(CALLERS) as calls:
        for number in range(len(target.texts)):
            if fault := await calls[0](number):
                wrong[fault] += 1
        wrong += (await closed_loop(calls, 0.0, LOOP_S)).wrong
    return wrong
