"""The rows of a chaos run: sentences whose right answers are known, and lines whose right error is."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

MODEL = "sentiment_model"
TOLERANCE = 1e-3
_SUBJECTS = ("the film", "this story", "her voice", "the ending", "every scene", "the music")
_VERDICTS = (
    "is a joy from the first minute", "never finds its feet", "moved me more than I expected", "is dull", "shines",
    "wastes a gifted cast and two hours of everybody's time", "is warm, funny and wise", "falls apart",
)  # fmt: skip
SENTENCES = tuple(f"{subject} {verdict}" for subject in _SUBJECTS for verdict in _VERDICTS)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a job's input and what its result has to be: a sentence's answer, or an error with this code."""

    raw: bytes
    id: str | None
    sentence: str | None
    error: str | None = None


class Answers:
    """What the model says of each sentence, asked once while nothing is broken."""

    def __init__(self, by_sentence: Mapping[str, Mapping[str, Any]]) -> None:
        self._by_sentence = by_sentence

    @classmethod
    def ask(cls, url: str) -> "Answers":
        """Ask `/predict` for every sentence."""
        reply = httpx.post(
            f"{url}/predict", json={"text": list(SENTENCES), "model": MODEL}, timeout=60, trust_env=False
        )
        reply.raise_for_status()
        return cls(dict(zip(SENTENCES, reply.json()["predictions"], strict=True)))

    def is_right(self, sentence: str, output: Mapping[str, Any]) -> bool:
        """Return whether an answer is the model's own."""
        wanted = self._by_sentence[sentence]
        return output.get("sentiment") == wanted["sentiment"] and (
            abs(float(output["score"]) - float(wanted["score"])) <= TOLERANCE
        )


def job_lines(dice: random.Random, prefix: str, count: int) -> Sequence[Line]:
    """Return lines of a JSONL job: most are sentences, some with an id, a few are wrong in ways that have a code."""
    lines = []
    for number in range(count):
        kind = dice.random()
        sentence = dice.choice(SENTENCES)
        if kind < 0.02:
            lines.append(Line(b'{"text": "cut', None, None, "invalid_json"))
        elif kind < 0.04:
            lines.append(Line(b'"\xff\xfe"', None, None, "invalid_unicode"))
        elif kind < 0.06:
            lines.append(Line(b'""', None, None, "empty_text"))
        elif kind < 0.5:
            name = f"{prefix}-{number}"
            lines.append(Line(json.dumps({"id": name, "text": sentence}).encode(), name, sentence))
        else:
            lines.append(Line(json.dumps(sentence).encode(), None, sentence))
    return lines
