"""The report's pictures, one for each section that has data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.bench import Data, Section
from benchmarks.painting import (
    BLUE,
    GREY,
    ORANGE,
    bars,
    callers_axis,
    canvas,
    curve,
    dress,
    line,
    lying_bars,
)
from benchmarks.stats import Figure

Grid = list[list[Axes]]
CURVE_CALLERS = 32
MOST_BARS = 16


@dataclass(frozen=True, slots=True)
class Painter:
    """Draws a section's data on axes in rows and columns."""

    paint: Callable[[Grid, Any], None]
    rows: Callable[[Data], int] = lambda _data: 1
    columns: int = 1


def draw(sections: Sequence[Section], folder: Path) -> list[str]:
    """Draw what can be drawn into ``folder``; returns the files' names."""
    names = []
    for section in sections:
        painter = PAINTERS.get(section.name)
        name = f"{section.name}.png"
        if painter is not None and section.data:
            with canvas(folder / name, section.title, painter.rows(section.data), painter.columns) as grid:
                painter.paint(grid, section.data)
        elif painter is None and (shown := _alike(section.figures)):
            with canvas(folder / name, section.title, 1, 1) as grid:
                lying_bars(grid[0][0], {figure.name: figure.runs for figure in shown}, shown[0].unit)
        else:
            continue
        names.append(name)
    return names


def _alike(figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures of the commonest unit, as bars of a section that has no picture of its own."""
    measured = [figure for figure in figures if np.isfinite(figure.median)]
    units = [figure.unit for figure in measured]
    return [figure for figure in measured if figure.unit == max(units, key=units.count)][:MOST_BARS]


def _predict(grid: Grid, data: Data) -> None:
    axes, callers = grid[0], data["callers"]
    place = callers.index(CURVE_CALLERS) if CURVE_CALLERS in callers else len(callers) - 1
    for arm, label, colour in (("gateway", "gateway /predict", BLUE), ("direct", "Triton direct (gRPC)", ORANGE)):
        line(axes[0], callers, data[arm]["per_s"], label, colour)
        line(axes[1], callers, data[arm]["p50_ms"], f"{label}, p50", colour)
        line(axes[1], callers, data[arm]["p99_ms"], f"{label}, p99", colour, "--")
        curve(axes[2], data["curve_percents"], data[arm]["curves_ms"][place], label, colour)
    for axis, unit in zip(axes[:2], ("requests/s", "ms"), strict=True):
        callers_axis(axis, callers, unit)
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")
    axes[2].set_ylim(bottom=0)
    dress(axes[2], f"percentile of the calls of {callers[place]} callers", "ms")


def _open(grid: Grid, data: Data) -> None:
    axis = grid[0][0]
    for rate, runs in zip(data["rates"], data["runs"], strict=True):
        places = [f"p{percent:g}" for percent in data["percents"]]
        axis.plot(places, np.median(np.array(runs), axis=0), marker="o", label=f"{rate:g} calls/s")
    axis.set_yscale("log")
    dress(axis, "percentile", "ms from the intended start")


def _topic(grid: Grid, data: Data) -> None:
    loops = {f"loop {name}": runs for name, runs in data["loops"].items()}
    trials = {f"loop {name} (trial)": [value] for name, value in data["trials"].items() if name not in data["loops"]}
    colours = [BLUE, *[ORANGE] * len(loops), *[GREY] * len(trials)]
    lying_bars(grid[0][0], {"topic": data["topic"], **loops, **trials}, "rows/s", colours)


def _mix(grid: Grid, data: Data) -> None:
    """Two rows for each rate: the spread of the calls and the topic's rows/s; and one run over time."""
    for place, (rate, measured) in enumerate(data.items()):
        spread, over_time = grid[2 * place], grid[2 * place + 1]
        _shares(spread[0], measured, f"ms from the intended start, {rate} calls/s", "share of the calls")
        bars(spread[1], {"alone": measured["topic_alone"], "with calls": measured["topic_shared"]}, "topic, rows/s")
        _over_time(over_time, measured["time"], rate)


def _shares(axis: Axes, data: Data, x: str, y: str) -> None:
    """Draw which share was answered within how many ms, alone and beside the topic."""
    for name, label, colour in (("alone_ms", "alone", GREY), ("beside_ms", "beside a saturated topic", BLUE)):
        values = np.sort(np.array(data[name]))
        shares = np.arange(1, len(values) + 1) / max(1, len(values))
        axis.step(values, shares, where="post", label=label, color=colour)
    axis.set_xscale("log")
    dress(axis, x, y)


def _stream(grid: Grid, data: Data) -> None:
    _shares(grid[0][0], data, "ms from the intended start", "share of the texts")


def _over_time(axes: list[Axes], data: Data, rate: str) -> None:
    for arm, label, colour in (("alone", "alone", GREY), ("beside", "beside the topic", BLUE)):
        axes[0].plot(data[arm]["at_s"], data[arm]["ms"], ".", markersize=3, color=colour, label=label)
    axes[0].set_yscale("log")
    rows = data["rows_per_s"]
    axes[1].step(range(len(rows)), rows, where="post", color=ORANGE, label="rows read in each second")
    for axis in axes:
        for arm, begin_s, end_s in data["spans"]:
            if arm == "beside":
                axis.axvspan(begin_s, end_s, color=BLUE, alpha=0.08, linewidth=0)
    dress(axes[0], f"s of one run, {rate} calls/s", "ms from the intended start")
    dress(axes[1], "s of the same run (shaded: calls beside the topic)", "topic, rows/s")


def _job(grid: Grid, data: Data) -> None:
    bars(grid[0][0], {"topic": data["topic"], "job": data["job"]}, "rows/s")


def _lanes(grid: Grid, data: Data) -> None:
    """One row for each way to share the processor: its calls alone and beside the topic, and the topic's rows/s."""
    for axes, (way, runs) in zip(grid, data.items(), strict=False):
        calls = {f"p{p}, {arm}": runs[f"p{p}_{arm}"] for p in (50, 99) for arm in ("alone", "beside")}
        lying_bars(axes[0], calls, f"ms, {way}")
        bars(axes[1], {"alone": runs["topic_alone"], "with calls": runs["topic_shared"]}, "topic, rows/s")


def _gap(grid: Grid, data: Data) -> None:
    axis = grid[0][0]
    for (name, run), colour in zip(data.items(), (GREY, BLUE), strict=False):
        axis.plot(run["at_s"], run["ms"], ".", markersize=2, color=colour, label=name)
    axis.set_yscale("log")
    dress(axis, "s", "ms until /healthz answered")


def _perf(grid: Grid, data: Data) -> None:
    line(grid[0][0], data["callers"], data["per_s"], "perf_analyzer", ORANGE)
    dress(grid[0][0], "callers", "inferences/s")
    grid[0][0].set_ylim(bottom=0)


def _growth(grid: Grid, data: Data) -> None:
    lying_bars(grid[0][0], data["ratios"], "at many ÷ at few")
    grid[0][0].axvline(1.0, color=GREY, linestyle="--", linewidth=1)


PAINTERS: dict[str, Painter] = {
    "predict": Painter(_predict, columns=3),
    "open": Painter(_open),
    "topic": Painter(_topic),
    "job": Painter(_job),
    "mix": Painter(_mix, rows=lambda data: 2 * len(data), columns=2),
    "lanes": Painter(_lanes, rows=len, columns=2),
    "gap": Painter(_gap),
    "perf": Painter(_perf),
    "growth": Painter(_growth),
    "stream": Painter(_stream),
}
