"""The model's output becomes answers: probabilities or an embedding, or an error of the row that has none."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    finite: list[bool] = np.all(np.isfinite(output), axis=1, keepdims=True).ravel().tolist()
    answers: Iterable[Answer] = _classify(spec, output, finite) if spec.task == "classify" else map(Embedding, output)
    return [answer if ok else _non_finite(spec) for answer, ok in zip(answers, finite, strict=True)]


def _classify(spec: ModelSpec, output: FloatArray, finite: Sequence[bool]) -> Iterator[Classification]:
    """Yield each row's answer; that of a row that is not finite means nothing."""
    logits = output.astype(np.float64)
    if not all(finite):
        logits[~np.asarray(finite)] = 0
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    rows: list[list[float]] = (exponentials / exponentials.sum(axis=1, keepdims=True)).tolist()
    sentiment = spec.is_sentiment
    positive = spec.labels.index("positive") if sentiment else None
    for best, probabilities in zip(logits.argmax(axis=1).tolist(), rows, strict=True):
        yield Classification(
            label=spec.labels[best],
            score=probabilities[best if positive is None else positive],
            scores=dict(zip(spec.labels, probabilities, strict=True)),
            sentiment=sentiment,
        )


def _non_finite(spec: ModelSpec) -> NonFiniteOutput:
    return NonFiniteOutput(f"{spec.name} answered NaN or Inf for this text")
