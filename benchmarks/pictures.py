"""The report's pictures."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.bench import Data, Section

BLUE, ORANGE, GREY = "#2463a5", "#d9822b", "#8a8f98"


def draw(sections: Sequence[Section], folder: Path) -> list[str]:
    """Draw what can be drawn into ``folder``; returns the files' names."""
    names = []
    for section in sections:
        painter = PAINTERS.get(section.name)
        if painter is None or not section.data:
            continue
        columns = 2 if painter in (_predict, _mix) else 1
        figure, axes = plt.subplots(1, columns, figsize=(5.5 * columns + 1, 3.8), layout="constrained", squeeze=False)
        figure.suptitle(textwrap.fill(section.title.replace("`", ""), 60 * columns), fontsize=10)
        painter(list(axes[0]), section.data)
        names.append(f"{section.name}.png")
        figure.savefig(folder / names[-1], dpi=120)
        plt.close(figure)
    return names


def _predict(axes: list[Axes], data: Data) -> None:
    callers = data["callers"]
    for arm, label, colour in (("gateway", "gateway /predict", BLUE), ("direct", "Triton direct (gRPC)", ORANGE)):
        _line(axes[0], callers, data[arm]["per_s"], label, colour)
        _line(axes[1], callers, data[arm]["p50_ms"], f"{label}, p50", colour)
        _line(axes[1], callers, data[arm]["p99_ms"], f"{label}, p99", colour, "--")
    for axis, unit in zip(axes, ("requests/s", "ms"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(callers, [str(n) for n in callers])
        _dress(axis, "callers", unit)
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")


def _line(
    axis: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], label: str, colour: str, style: str = "-"
) -> None:
    """Draw medians, with lowest and highest run as bars."""
    middle = [float(np.median(run)) for run in runs]
    spread = [
        [m - min(run) for m, run in zip(middle, runs, strict=True)],
        [max(run) - m for m, run in zip(middle, runs, strict=True)],
    ]
    axis.errorbar(x, middle, yerr=spread, label=label, color=colour, linestyle=style, marker="o", capsize=3)


def _open(axes: list[Axes], data: Data) -> None:
    for rate, runs in zip(data["rates"], data["runs"], strict=True):
        axes[0].plot(
            [f"p{p:g}" for p in data["percents"]],
            np.median(np.array(runs), axis=0),
            marker="o",
            label=f"{rate:g} calls/s",
        )
    axes[0].set_yscale("log")
    _dress(axes[0], "percentile", "ms from the intended start")


def _topic(axes: list[Axes], data: Data) -> None:
    bars: dict[str, list[float]] = {
        "topic": data["topic"],
        **{f"loop {name}": runs for name, runs in data["loops"].items()},
    }
    bars |= {f"loop {name} (trial)": [value] for name, value in data["trials"].items() if name not in data["loops"]}
    middle = [float(np.median(runs)) for runs in bars.values()]
    spread = [
        [m - min(r) for m, r in zip(middle, bars.values(), strict=True)],
        [max(r) - m for m, r in zip(middle, bars.values(), strict=True)],
    ]
    colours = [BLUE, *[ORANGE] * len(data["loops"]), *[GREY] * (len(bars) - 1 - len(data["loops"]))]
    axes[0].barh(list(bars), middle, xerr=spread, color=colours, capsize=3)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("rows/s")


def _mix(axes: list[Axes], data: Data) -> None:
    for name, label, colour in (("alone_ms", "alone", GREY), ("beside_ms", "beside a saturated topic", BLUE)):
        values = np.sort(np.array(data[name]))
        axes[0].step(
            values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=label, color=colour
        )
    axes[0].set_xscale("log")
    _dress(axes[0], "ms from the intended start", "share of the calls")
    _two_bars(axes[1], {"alone": data["topic_alone"], "with calls": data["topic_shared"]}, "topic, rows/s")


def _job(axes: list[Axes], data: Data) -> None:
    _two_bars(axes[0], {"topic": data["topic"], "job": data["job"]}, "rows/s")


def _two_bars(axis: Axes, bars: dict[str, list[float]], unit: str) -> None:
    """Draw two medians with every run as a point."""
    axis.bar(list(bars), [float(np.median(runs)) for runs in bars.values()], color=[GREY, BLUE])
    for place, runs in enumerate(bars.values()):
        axis.plot([place] * len(runs), runs, "k.", markersize=4)
    axis.set_ylabel(unit)


def _gap(axes: list[Axes], data: Data) -> None:
    for (name, run), colour in zip(data.items(), (GREY, BLUE), strict=False):
        axes[0].plot(run["at_s"], run["ms"], ".", markersize=2, color=colour, label=name)
    axes[0].set_yscale("log")
    _dress(axes[0], "s", "ms until /healthz answered")


def _perf(axes: list[Axes], data: Data) -> None:
    _line(axes[0], data["callers"], data["per_s"], "perf_analyzer", ORANGE)
    _dress(axes[0], "callers", "inferences/s")
    axes[0].set_ylim(bottom=0)


def _dress(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize=8)


PAINTERS: dict[str, Callable[[list[Axes], Any], None]] = {
    "predict": _predict, "open": _open, "topic": _topic, "job": _job, "mix": _mix, "gap": _gap, "perf": _perf,
}  # fmt: skip
