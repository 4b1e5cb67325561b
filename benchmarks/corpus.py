"""The texts that are sent, their tokens, and the right answer of each by the model's own file."""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.callers import Expected, answer_of
from benchmarks.ort_loop import LoopJob, prepare, run_prepared
from benchmarks.workers import Workers
from serving.errors import ConfigError
from serving.models import ModelSpec, parse_spec
from serving.preprocess import Encoded, IdArray, Tokenizer, pad
from twodoor.demo import docs_text, sentences

SST2_DEFAULT = "../shared/data/sst2"
SST2_FILES = ("test.tsv", "dev.tsv", "train.tsv")


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in the order they are sent; ``labels`` are 0 or 1, None where nobody knows, ``source`` says whose they are."""

    texts: tuple[str, ...]
    labels: tuple[int | None, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts with what must come back for each, and each one's tokens."""

    source: str
    texts: tuple[str, ...]
    rows: tuple[Encoded, ...]
    expected: tuple[Expected, ...]
    accuracy: float | None

    def tensors(self, spec: ModelSpec) -> list[dict[str, IdArray]]:
        """Return each row's input tensors as the gateway would send it alone, of shape [1, bucket length]."""
        return [pad(spec, [row]) for row in self.rows]


def sst2_texts(count: int) -> Texts:
    """Return ``count`` texts of the folder that ``TWODOOR_SST2_DIR`` names, or of its usual place, as `read_texts` does."""
    return read_texts(Path(os.environ.get("TWODOOR_SST2_DIR") or SST2_DEFAULT), count)


def read_spec(config: Mapping[str, Any], folder: Path, version: str = "") -> ModelSpec:
    """Return what a model is by its config and the labels in its folder; raises ConfigError."""
    return parse_spec(config, version, (folder / "labels.txt").read_text(encoding="utf-8").split())


def sentiment_spec(config: Mapping[str, Any], folder: Path) -> ModelSpec:
    """As `read_spec`; raises ConfigError also for a model whose answers the reports cannot check."""
    spec = read_spec(config, folder)
    if not spec.is_sentiment:
        raise ConfigError(f"model {spec.name} does not tell negative from positive, which is what the report checks")
    return spec


def read_texts(sst2: Path, count: int) -> Texts:
    """Return ``count`` texts: SST-2's where its folder is there, else the demo's; too few are repeated."""
    files = [sst2 / name for name in SST2_FILES if (sst2 / name).is_file()]
    if files:
        found = list(itertools.islice(itertools.chain.from_iterable(map(read_tsv, files)), count))
        return Texts(tuple(text for text, _ in found), tuple(label for _, label in found), "SST-2")
    texts, labels = zip(*itertools.islice(itertools.cycle(demo_texts(count)), count), strict=True)
    return Texts(texts, labels, "the demo's text (SST-2 is not here)")


def read_tsv(file: Path) -> list[tuple[str, int]]:
    """Read lines of text, tab, 0 or 1."""
    lines = file.read_text(encoding="utf-8").split("\n")
    pairs = [line.rpartition("\t") for line in lines if line.strip()]
    return [(text, int(label)) for text, _, label in pairs]


def demo_texts(most: int) -> list[tuple[str, int | None]]:
    """Return the demo's labelled sentences, then those of this machine's documentation, which nobody labelled."""
    labelled: list[tuple[str, int | None]] = [(row.text, int(row.label == "positive")) for row in sentences.load()]
    return labelled + [(text, None) for text in docs_text.collect(max(1, most - len(labelled)))]


async def build(texts: Texts, spec: ModelSpec, model_folder: Path, workers: Workers) -> Corpus:
    """Tokenize, and answer every text by the model file in plain ONNX Runtime. Texts that are too long are left out."""
    tokenizer = Tokenizer(model_folder / "tokenizer", spec)
    encoded = tokenizer.encode(texts.texts, truncate=False)
    kept = [index for index, row in enumerate(encoded) if isinstance(row, Encoded)]
    rows = [row for row in encoded if isinstance(row, Encoded)]
    order = sorted(range(len(rows)), key=lambda index: rows[index].tokens)
    job = LoopJob(str(model_folder / "1" / "model.onnx"), spec.inputs, spec.output, [rows[i].ids for i in order])
    await workers.run("loop-0", prepare, job, timeout_s=120)
    share = await workers.run("loop-0", run_prepared, 0.0, timeout_s=300)
    expected: list[Expected] = [Expected(False, 0.5)] * len(rows)
    for index, logits in zip(order, share.outputs, strict=True):
        expected[index] = Expected(*answer_of(logits))
    labels = [texts.labels[index] for index in kept]
    return Corpus(
        texts.source,
        tuple(texts.texts[index] for index in kept),
        tuple(rows),
        tuple(expected),
        accuracy(expected, labels),
    )


def accuracy(expected: Sequence[Expected], labels: Sequence[int | None]) -> float | None:
    """Return the share of right labels among those that are known; None where none is."""
    right = [e.positive == bool(label) for e, label in zip(expected, labels, strict=True) if label is not None]
    return float(np.mean(right)) if right else None
