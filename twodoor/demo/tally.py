"""What the demo counts: calls and their latencies, one result for each record, the same label at both doors. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Two doors may pad a text differently; promise 9 allows this much of a difference in a score.
SCORE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Verdict:
    """A text's answer in short."""

    label: str
    score: float

    def agrees(self, other: "Verdict") -> bool:
        """Return whether both say the same, within the tolerance of the score."""
        return self.label == other.label and abs(self.score - other.score) <= SCORE_TOLERANCE


@dataclass(slots=True)
class Calls:
    """The calls of one phase; a latency runs from the moment the call was due, not from when it got its turn."""

    latencies_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def percentile_ms(self, percent: float) -> float:
        """Return the nearest-rank percentile; NaN where there was no call."""
        ordered = sorted(self.latencies_ms)
        if not ordered:
            return float("nan")
        return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]


class Records:
    """What came back for each id that was handed over; ``kind`` is what such a thing is called."""

    def __init__(self, texts: Mapping[str, str], kind: str = "records") -> None:
        self.texts = texts
        self.kind = kind
        self.verdicts: dict[str, Verdict] = {}
        self._counts: Counter[str] = Counter()
        self._errors: dict[str, str] = {}

    def add(self, result: Mapping[str, Any]) -> None:
        """Count one result record."""
        row_id = str(result.get("id"))
        self._counts[row_id] += 1
        output = result.get("output")
        if isinstance(output, Mapping) and "label" in output:
            self.verdicts[row_id] = Verdict(str(output["label"]), float(output["score"]))
        else:
            self._errors[row_id] = str((result.get("error") or {}).get("code", "no answer in the result"))

    @property
    def answered(self) -> int:
        """How many of the ids have at least one result."""
        return sum(1 for row_id in self.texts if row_id in self._counts)

    @property
    def complete(self) -> bool:
        """Whether each id has at least one result; cheap enough to ask after every batch."""
        return len(self._counts) >= len(self.texts) and self.answered == len(self.texts)

    def problems(self, interactive: Mapping[str, Verdict]) -> list[str]:
        """Return what is wrong, in short sentences; ``interactive`` is what `/predict` said of each text."""
        missing = [row_id for row_id in self.texts if row_id not in self._counts]
        twice = [row_id for row_id, count in self._counts.items() if count > 1]
        strange = [row_id for row_id in self._counts if row_id not in self.texts]
        differ = [
            row_id
            for row_id, verdict in self.verdicts.items()
            if row_id in self.texts and not verdict.agrees(interactive.get(self.texts[row_id], Verdict("", -1.0)))
        ]
        counted: tuple[tuple[Sequence[str], str], ...] = (
            (missing, f"{self.kind} without a result"),
            (twice, f"{self.kind} answered more than once"),
            (strange, f"results of {self.kind} that were not sent"),
            (list(self._errors), f"{self.kind} with an error for an answer"),
            (differ, f"{self.kind} answered otherwise than by /predict"),
        )
        return [f"{len(ids):,} {what} ({ids[0]}{self._reason(ids[0])}, …)" for ids, what in counted if ids]

    def _reason(self, row_id: str) -> str:
        return f": {self._errors[row_id]}" if row_id in self._errors else ""


def miscounted(counts: Mapping[str, int], lines: Sequence[tuple[int, bool]], sent: int) -> list[str]:
    """Return what is wrong with a job's own counts; ``lines`` are its results as (index, whether it failed)."""
    found = []
    if [index for index, _ in lines] != list(range(sent)):
        found.append(f"the job's {len(lines):,} results are not one for each of its {sent:,} rows, in order")
    failed = sum(bad for _, bad in lines)
    true = {"total": sent, "succeeded": len(lines) - failed, "failed": failed, "pending": 0}
    if dict(counts) != true:
        found.append(f"the job counts {dict(counts)}, its results {true}")
    return found


def accuracy(verdicts: Iterable[tuple[str, Verdict | None]]) -> float:
    """Return the share of (true label, verdict) pairs that agree; a missing verdict is a wrong one."""
    pairs = list(verdicts)
    return sum(verdict is not None and verdict.label == label for label, verdict in pairs) / max(1, len(pairs))
