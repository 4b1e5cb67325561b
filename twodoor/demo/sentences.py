"""The 200 labelled sentences written for this project: 100 positive, 100 negative, of many topics."""

from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("sentences.tsv")


@dataclass(frozen=True, slots=True)
class Labelled:
    """A sentence and what it says: ``positive`` or ``negative``."""

    text: str
    label: str


def load() -> list[Labelled]:
    """Return the sentences in the order of the file."""
    rows = (line.split("\t", 1) for line in FILE.read_text(encoding="utf-8").splitlines())
    return [Labelled(text, "positive" if label == "1" else "negative") for label, text in rows]
