"""Measure the default models' variants: `python -m model_builder.measure [--save]`, about four minutes of a quiet machine.

Over SST-2's test sentences: accuracy, labels that flip and the largest change of an output between each text alone
and the same text in batches and at other paddings, speed and size. Reads TWODOOR_SST2_DIR. The model cards copy what
`--save` commits.
"""

import argparse
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from model_builder import say, sst2, tables
from model_builder.builder import build
from model_builder.config import default_cores
from model_builder.recipes import PRECISIONS, RECIPES, SENTIMENT
from model_builder.run import Outputs, Runner
from model_builder.tokens import Encoder, Row

BATCH = 16
SPEED_ROUNDS, SPEED_ROWS = 3, 200
OTHERS_EVERY = 8  # of the variants that are not the default: the whole would take a quarter of an hour
RECIPES_BY_NAME = {recipe.name: recipe for recipe in RECIPES}
# (rows, padded length; None is the longest row's): batches in the file's order and sorted, near and far paddings.
OTHER_SHAPES = ((32, None), (8, 96), (1, 64))
METHOD = (
    "SST-2's 1,821 test sentences. Alone: one by one, unpadded. Flips and change: against sorted batches of "
    f"{BATCH}, batches of 32 in file order, batches of 8 padded to 96, and one by one padded to 64 (FP16 and FP32 of "
    "sentiment_model and FP16 of embedding_model: the last three over every eighth sentence)"
)


@dataclass(frozen=True)
class Variant:
    """One built model at one precision, ready to run, with the test sentences as its tokenizer reads them."""

    model: str
    precision: str
    runner: Runner
    rows: list[Row]
    size_mb: int


@dataclass(frozen=True)
class Invariance:
    """How answers depend on neighbours and padding, over all rows and shapes tried."""

    alone: Outputs
    batched: Outputs
    flips: int
    largest_change: float


def invariance(runner: Runner, rows: list[Row], every: int = 1) -> Invariance:
    """Run each row alone and in sorted batches, each ``every``-th row in other batches and at other paddings, and
    compare everything with alone."""
    alone = runner.sorted_batches(rows, 1)
    batched = runner.sorted_batches(rows, BATCH)
    flips = batched.argmax(axis=1) != alone.argmax(axis=1)
    change = float(np.abs(batched - alone).max())
    some = rows[::every]
    for size, length in OTHER_SHAPES:
        groups = [some[start : start + size] for start in range(0, len(some), size)]
        result = np.concatenate([runner(group, _at_least(group, length)) for group in groups])
        flips[::every] |= result.argmax(axis=1) != alone[::every].argmax(axis=1)
        change = max(change, float(np.abs(result - alone[::every]).max()))
    return Invariance(alone, batched, int(flips.sum()), change)


def accuracy(outputs: Outputs, labels: list[int]) -> float:
    """Return the share of rows whose largest logit is the label's."""
    return float((outputs.argmax(axis=1) == np.array(labels)).mean())


def _at_least(rows: list[Row], length: int | None) -> int | None:
    return length and max(length, *(len(row) for row in rows))


def speeds(variants: Sequence[Variant]) -> list[dict[str, int]]:
    """Return rows/s of each variant in sorted batches and one by one: the best of several rounds in turn, so that a
    noisy neighbour strikes all variants alike."""
    best: list[dict[str, int]] = [{} for _ in variants]
    for _ in range(SPEED_ROUNDS):
        for variant, figures in zip(variants, best, strict=True):
            rows = variant.rows[:: len(variant.rows) // SPEED_ROWS]
            for name, size in (("rows_per_s", BATCH), ("rows_per_s_alone", 1)):
                started = time.perf_counter()
                variant.runner.sorted_batches(rows, size)
                found = round(len(rows) / (time.perf_counter() - started))
                figures[name] = max(found, figures.get(name, 0))
    return best


def measure(variant: Variant, labels: list[int] | None) -> dict[str, Any]:
    """Return accuracy and flips (with labels), the largest change and the size of one variant."""
    default = variant.precision == RECIPES_BY_NAME[variant.model].effective("int8")
    found = invariance(variant.runner, variant.rows, 1 if default else OTHERS_EVERY)
    figures: dict[str, Any] = {"largest_change": tables.rounded(found.largest_change, 2), "size_mb": variant.size_mb}
    if labels is not None:
        figures["accuracy_alone"] = round(accuracy(found.alone, labels), 4)
        figures["accuracy_batched"] = round(accuracy(found.batched, labels), 4)
        figures["flips"] = found.flips
    return figures


def _variants(folder: Path, cache: Path, texts: list[str]) -> list[Variant]:
    variants: dict[tuple[str, str], Variant] = {}
    for precision in PRECISIONS:
        for built in build(folder / precision, cache, precision, progress=say.progress):
            recipe = RECIPES_BY_NAME[built.name]
            variants[built.name, built.precision] = Variant(
                model=built.name,
                precision=built.precision,
                runner=Runner(built.path / "1" / "model.onnx", default_cores()),
                rows=Encoder(built.path / "tokenizer", recipe.prompt_prefix)(texts),
                size_mb=round(built.size_bytes / 1e6),
            )
    return list(variants.values())


def main() -> None:
    """Build every variant in a temporary repository, measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path(".models-cache"))
    parser.add_argument("--save", action="store_true", help="replace the committed figures")
    arguments = parser.parse_args()
    split = sst2.read(sst2.folder() / "test.tsv")
    models: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        variants = _variants(Path(folder), arguments.cache, split.texts)
        for variant, speed in zip(variants, speeds(variants), strict=True):
            figures = speed | measure(variant, split.labels if variant.model == SENTIMENT.name else None)
            models.setdefault(variant.model, {})[variant.precision] = figures
            say.answer(f"{variant.model} {variant.precision} {figures}")
    if arguments.save:
        threads = f"{default_cores()} threads on {os.cpu_count()} cores ({platform.machine()})"
        table = {
            "made_by": "python -m model_builder.measure --save",
            "method": METHOD,
            "machine": f"{threads}, onnxruntime {version('onnxruntime')}",
            "models": models,
        }
        tables.save(tables.MEASURED, table)
        say.progress(f"wrote {tables.MEASURED}")


if __name__ == "__main__":
    main()
