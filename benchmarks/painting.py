"""What the report's pictures are made of: lines with their spread, bars with every run, axes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#2463a5", "#d9822b", "#8a8f98"
PERCENT_TICKS = (50, 90, 99, 99.9)


@contextmanager
def canvas(file: Path, title: str, rows: int, columns: int) -> Iterator[list[list[Axes]]]:
    """Give axes in rows and columns; the picture is written at the end of the block."""
    size = (5.5 * columns + 1, 3.4 * rows + 0.4)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title.replace("`", ""), fontsize=10, wrap=True)
    try:
        yield [list(row) for row in axes]
        figure.savefig(file, dpi=120)
    finally:
        plt.close(figure)


def colours(count: int) -> list[str]:
    """Return as many colours that can be told apart."""
    palette = plt.get_cmap("tab10")
    return [mpl.colors.to_hex(palette((place + 1) % palette.N)) for place in range(count)]


def line(
    axis: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], label: str, colour: str, style: str = "-"
) -> None:
    """Draw medians, with lowest and highest run as bars."""
    middle, spread = _spread(runs)
    axis.errorbar(x, middle, yerr=spread, label=label, color=colour, linestyle=style, marker="o", capsize=3)


def bars(axis: Axes, named: Mapping[str, Sequence[float]], unit: str, colours: Sequence[str] = (GREY, BLUE)) -> None:
    """Draw upright medians with every run as a point."""
    axis.bar(list(named), [float(np.median(runs)) for runs in named.values()], color=list(colours))
    for place, runs in enumerate(named.values()):
        axis.plot([place] * len(runs), runs, "k.", markersize=4)
    axis.set_ylabel(unit)


def lying_bars(axis: Axes, named: Mapping[str, Sequence[float]], unit: str, colours: Sequence[str] = (BLUE,)) -> None:
    """Draw medians from left to right with lowest and highest run: for names that are long."""
    middle, spread = _spread(list(named.values()))
    axis.barh(list(named), middle, xerr=spread, color=list(colours), capsize=3)
    axis.tick_params(axis="y", labelsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(unit)


def _spread(runs: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    middle = [float(np.median(run)) for run in runs]
    low = [m - min(run) for m, run in zip(middle, runs, strict=True)]
    high = [max(run) - m for m, run in zip(middle, runs, strict=True)]
    return middle, [low, high]


def curve(axis: Axes, percents: Sequence[float], runs: Sequence[Sequence[float]], label: str, colour: str) -> None:
    """Draw latency over the percentile, so that each nine has the same width; the band is lowest to highest run."""
    x = [_nines(percent) for percent in percents]
    values = np.array(runs)
    axis.plot(x, np.median(values, axis=0), color=colour, label=label)
    axis.fill_between(x, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    axis.set_xticks([_nines(percent) for percent in PERCENT_TICKS], [f"{percent:g}" for percent in PERCENT_TICKS])


def _nines(percent: float) -> float:
    return float(-np.log10(1 - percent / 100))


def callers_axis(axis: Axes, callers: Sequence[int], unit: str) -> None:
    """Dress an axis whose x is the number of callers."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(callers, [str(n) for n in callers])
    dress(axis, "callers", unit)


def dress(axis: Axes, x: str, y: str) -> None:
    """Name both axes, draw grid and legend."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(visible=True, alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
