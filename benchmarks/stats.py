"""Figures with their spread, and ratios between arms that took turns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Floats = Sequence[float] | npt.NDArray[np.float64]


def percentile(values: Floats, percent: float) -> float:
    """Return a percentile by linear interpolation; NaN where there are no values."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent)) if len(values) else float("nan")


def number(value: float) -> str:
    """Return a figure with three digits that mean something."""
    if not math.isfinite(value):
        return "n/a"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must reach: at least, or at most, ``limit``."""

    limit: float
    at_least: bool = True

    def met_by(self, value: float) -> bool:
        """Return whether a value reaches the bar; NaN never does."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity measured in one or more runs; reported as the median with the lowest and highest run."""

    name: str
    unit: str
    runs: tuple[float, ...]
    bar: Bar | None = None
    headline: bool = False
    """Whether the README's table names it; a figure with a bar stands there anyway."""

    @property
    def median(self) -> float:
        """The median over the runs; NaN where nothing was measured."""
        return percentile(self.runs, 50)

    @property
    def low(self) -> float:
        """The lowest run."""
        return min(self.runs, default=float("nan"))

    @property
    def high(self) -> float:
        """The highest run."""
        return max(self.runs, default=float("nan"))

    @property
    def verdict(self) -> str:
        """``met`` or ``missed`` where there is a bar, otherwise empty."""
        if self.bar is None:
            return ""
        return "met" if self.bar.met_by(self.median) else "missed"

    def as_json(self) -> dict[str, object]:
        """Return the figure as it stands in the report."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "low": self.low,
            "high": self.high,
            "runs": list(self.runs),
            "bar": None if self.bar is None else {"limit": self.bar.limit, "at_least": self.bar.at_least},
            "verdict": self.verdict or None,
            "headline": self.headline or self.bar is not None,
        }


def paired_ratio(
    name: str,
    numerators: Sequence[float],
    denominators: Sequence[float],
    bar: Bar | None = None,
    *,
    headline: bool = False,
) -> Figure:
    """Return numerator ÷ denominator round by round: both arms of a round ran next to each other.

    Raises ValueError where the arms have different numbers of rounds.
    """
    pairs = zip(numerators, denominators, strict=True)
    return Figure(name, "ratio", tuple(a / b if b else float("nan") for a, b in pairs), bar, headline)


def paired_difference(
    name: str, unit: str, values: Sequence[float], less: Sequence[float], bar: Bar | None = None
) -> Figure:
    """Return value - ``less`` round by round. Raises ValueError where the arms have different numbers of rounds."""
    return Figure(name, unit, tuple(a - b for a, b in zip(values, less, strict=True)), bar)
