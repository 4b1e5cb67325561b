"""Accuracy and promise 9 (same text, same answer) of the default sentiment model over SST-2's test sentences."""

from pathlib import Path

import pytest

from model_builder import sst2
from model_builder.builder import build
from model_builder.measure import accuracy, invariance
from model_builder.run import Runner
from model_builder.tokens import Encoder

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_the_int8_model_is_right_often_enough_and_never_depends_on_its_neighbours(tmp_path: Path) -> None:
    file = sst2.folder() / "test.tsv"
    if not file.is_file():
        pytest.skip("not run: SST-2")
    split = sst2.read(file)
    assert len(split.texts) == 1821
    (built,) = build(
        tmp_path / "repository", ROOT / ".models-cache", models=["sentiment_model"], progress=lambda _: None
    )
    rows = Encoder(built.path / "tokenizer", "query: ")(split.texts)
    # Alone and in sorted batches every row; in the other shapes every ninth, to keep the time. All rows in all shapes:
    # `python -m model_builder.measure`.
    found = invariance(Runner(built.path / "1" / "model.onnx", 2), rows, every=9)
    assert accuracy(found.alone, split.labels) >= 0.895
    assert accuracy(found.batched, split.labels) >= 0.895
    assert found.flips == 0
    assert found.largest_change <= 1e-4
