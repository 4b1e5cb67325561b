"""The committed figures a build needs besides the fetched files: the head, the calibration ranges, the measurements."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model_builder.graph import Head
from model_builder.quantize import Range

FOLDER = Path(__file__).parent / "data"
HEAD = FOLDER / "sentiment_head.json"
RANGES = FOLDER / "sentiment_ranges.json"
MEASURED = FOLDER / "measured.json"


def load_head() -> Head:
    """Return the sentiment head; logits are [-z/2, z/2] of the committed logistic regression z."""
    table = json.loads(HEAD.read_text())
    half = np.array([*table["weight"], table["bias"]]) / 2
    both = np.stack([-half, half], axis=1).astype(np.float32)
    return Head(weight=both[:-1], bias=both[-1])


def load_ranges() -> dict[str, Range]:
    """Return activation name → (min, max) of the sentiment model's calibration."""
    table = json.loads(RANGES.read_text())
    return {name: (float(low), float(high)) for name, (low, high) in table["ranges"].items()}


def load_measured() -> dict[str, Any]:
    """Return what `python -m model_builder.measure` last wrote; empty before its first run."""
    if not MEASURED.is_file():
        return {}
    table: dict[str, Any] = json.loads(MEASURED.read_text())
    return table


def save(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table so that the same figures give the same bytes."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def rounded(value: float, digits: int = 6) -> float:
    """Round to significant digits: more would only record noise of the machine that measured."""
    return float(f"{value:.{digits}g}")
