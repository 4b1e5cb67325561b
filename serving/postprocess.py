"""The model's output becomes answers: probabilities or an embedding, or an error of the row that has none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.errors import NonFiniteOutput, RowError
from serving.models import ModelSpec

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Classification:
    """A classifier's answer; ``scores`` are probabilities by label, in the model's order.

    ``score`` is the probability of ``label``; where the labels are negative and positive it is that of positive,
    in every form and at every door.
    """

    label: str
    score: float
    scores: Mapping[str, float]
    sentiment: bool

    def as_json(self) -> dict[str, Any]:
        """Return the answer as it stands in JSON."""
        answer: dict[str, Any] = {"label": self.label, "score": self.score, "scores": dict(self.scores)}
        return {"sentiment": self.label, **answer} if self.sentiment else answer


@dataclass(frozen=True, slots=True)
class Embedding:
    """An embedder's answer: FP32 of shape [size]."""

    values: FloatArray

    def as_json(self) -> dict[str, Any]:
        """Return the answer as it stands in JSON."""
        return {"embedding": self.values.tolist()}


Answer = Classification | Embedding


def render(spec: ModelSpec, output: FloatArray) -> list[Answer | RowError]:
    """Return one answer or error per row of ``output``, FP32 of shape [rows, output_size]."""
    finite = [bool(row.all()) for row in np.isfinite(output)]
    if spec.task == "classify":
        return [_classify(spec, row) if ok else _non_finite(spec) for row, ok in zip(output, finite, strict=True)]
    return [Embedding(row) if ok else _non_finite(spec) for row, ok in zip(output, finite, strict=True)]


def _classify(spec: ModelSpec, logits: FloatArray) -> Classification:
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = (exponentials / exponentials.sum()).tolist()
    best = int(logits.argmax())
    shown = spec.labels.index("positive") if spec.is_sentiment else best
    return Classification(
        label=spec.labels[best],
        score=probabilities[shown],
        scores=dict(zip(spec.labels, probabilities, strict=True)),
        sentiment=spec.is_sentiment,
    )


def _non_finite(spec: ModelSpec) -> NonFiniteOutput:
    return NonFiniteOutput(f"{spec.name} answered NaN or Inf for this text")
