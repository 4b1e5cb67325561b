"""The FP16 model of a GPU run, what it must answer by its FP32 sister on the CPU, and its form for a machine without a GPU."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.callers import Expected, answer_of
from benchmarks.corpus import Corpus, read_spec
from benchmarks.ort_loop import LoopJob, prepare, run_prepared
from model_builder import build
from model_builder.config import warm_lengths
from serving.errors import ConfigError
from serving.models import ModelSpec, check_twin
from serving.preprocess import Encoded, Tokenizer
from serving.triton_client import parse_config

MODEL = "sentiment_model"
HALF_TOLERANCE = 0.02
"""FP16 keeps three digits, and a device adds in another order: a score may differ by this from FP32's."""


@dataclass(frozen=True, slots=True)
class HalfExpected(Expected):
    """The right answer of a text by the FP32 file."""

    def fault(self, positive: bool, score: float) -> str:
        """Return an empty string, or what is wrong."""
        if not abs(score - self.score) <= HALF_TOLERANCE:
            return "wrong score"
        if positive != self.positive and abs(self.score - 0.5) > HALF_TOLERANCE:
            return "wrong label"
        return ""


@dataclass(frozen=True, slots=True)
class Models:
    """Two repositories with the same model: FP16 for the GPU, FP32 for its right answers."""

    fp16: Path
    fp32: Path


def build_models(folder: Path, cache: Path, say: Callable[[str], None]) -> Models:
    """Build both, or see that they are up to date; raises ConfigError."""
    for precision in ("fp16", "fp32"):
        build(folder / precision, cache, precision, [MODEL], say)
    return Models(folder / "fp16", folder / "fp32")


def check_configs(repository: Path) -> ModelSpec:
    """Read the FP16 model's config and its twin's as a door does; raises ConfigError for anything that does not fit."""
    config, twin = (parse_config(_config(repository, name).read_text()) for name in (MODEL, f"{MODEL}_bulk"))
    spec = read_spec(config, repository / MODEL, "1")
    check_twin(spec, twin)
    for one in (config, twin):
        warm = {int(entry["inputs"]["input_ids"]["dims"][0]) for entry in one["model_warmup"]}
        if missing := set(warm_lengths(spec.max_tokens)) - warm:
            raise ConfigError(
                f"model {one['name']}: lengths {sorted(missing)} are not warmed, so their first rows would wait"
            )
        if any(group.get("kind", "KIND_AUTO") != "KIND_AUTO" for group in one["instance_group"]):
            raise ConfigError(f"model {one['name']}: its instances are not left to Triton to place")
    return spec


def cpu_form(repository: Path, target: Path) -> None:
    """Copy a repository with one warm-up run for each model: all of them would take a CPU minutes."""
    shutil.copytree(repository, target, ignore=shutil.ignore_patterns(".*"))
    for name in (MODEL, f"{MODEL}_bulk"):
        file = _config(target, name)
        head, _, warmup = file.read_text().partition("model_warmup [")
        first = re.split(r"\},\n  \{ name:", warmup, maxsplit=1)[0]
        closed = first if first.rstrip().endswith("]") else first + "}\n]\n"
        file.write_text(f"{head}model_warmup [{closed}")


def reference(repository: Path, spec: ModelSpec, texts: tuple[str, ...]) -> Corpus:
    """Answer texts by the FP32 file in plain ONNX Runtime, in this process. Texts that are too long are left out."""
    tokenizer = Tokenizer(repository / MODEL / "tokenizer", spec)
    pairs = zip(texts, tokenizer.encode(texts, truncate=False), strict=True)
    kept = sorted(((row, text) for text, row in pairs if isinstance(row, Encoded)), key=lambda pair: pair[0].tokens)
    job = LoopJob(str(repository / MODEL / "1" / "model.onnx"), spec.inputs, spec.output, [row.ids for row, _ in kept])
    prepare(job)
    outputs = run_prepared(0.0).outputs
    if not np.isfinite(outputs).all():
        raise ConfigError("the FP32 model gives values that are not finite")
    expected = tuple(HalfExpected(*answer_of(logits)) for logits in outputs)
    return Corpus("", tuple(text for _, text in kept), tuple(row for row, _ in kept), expected, None)


def as_half(corpus: Corpus) -> Corpus:
    """Return a corpus whose answers may differ by what FP16 makes of them."""
    return replace(corpus, expected=tuple(HalfExpected(one.positive, one.score) for one in corpus.expected))


def _config(repository: Path, name: str) -> Path:
    return repository / name / "config.pbtxt"
