"""Telling a busy model from a dead one: its canary row, and how long it has got nothing done."""

import json
import time
from pathlib import Path
from typing import Any


class Progress:
    """How long a model has done nothing although it was asked."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._count = -1
        self._since = time.monotonic()

    def moved(self, count: int) -> bool:
        """Note the number of executions; True if it grew since the last look."""
        moved = 0 <= self._count < count
        self._count = count
        if moved:
            self.alive()
        return moved

    def alive(self) -> None:
        """Note a sign of life."""
        self._since = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether the last sign of life is too long ago."""
        return time.monotonic() - self._since > self._timeout_s


class Canary:
    """One row whose answer is known: ``canary.json`` in the model's folder."""

    def __init__(self, data: dict[str, Any]) -> None:
        """Read the file's content; raises KeyError, TypeError or ValueError where it is no canary row."""
        self._inputs: dict[str, list[int]] = {str(name): [int(i) for i in ids] for name, ids in data["inputs"].items()}
        self._output = str(data["output"]["name"])
        self._values = [float(value) for value in data["output"]["values"]]
        self._tolerance = float(data["output"]["tolerance"])

    @classmethod
    def read(cls, path: Path) -> "Canary | None":
        """Return the canary of a model; None if it has none that can be read."""
        try:
            return cls(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def request(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the row as an inference request of shape [1, n]; types come from the model's metadata."""
        types = {item["name"]: item["datatype"] for item in metadata["inputs"]}
        inputs = [
            {"name": name, "shape": [1, len(values)], "datatype": types.get(name, "INT64"), "data": values}
            for name, values in self._inputs.items()
        ]
        return {"inputs": inputs, "outputs": [{"name": self._output}]}

    def differs(self, answer: dict[str, Any]) -> bool:
        """Whether an answer is farther from the known one than its tolerance (a NaN is)."""
        got: list[float] = next((o["data"] for o in answer["outputs"] if o["name"] == self._output), [])
        want = self._values
        return len(got) != len(want) or not all(abs(a - b) <= self._tolerance for a, b in zip(got, want, strict=True))
