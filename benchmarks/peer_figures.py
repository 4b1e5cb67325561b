"""The comparison with other servers, read from the file that `python -m benchmarks.peers` leaves: table and picture."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stats import number, percentile

JSON_NAME = "peers.json"
PICTURE_NAME = "peers.png"
OURS = "twodoor"
TABLE_CALLERS = ("1", "32", "128")
_HEAD = (
    *(f"requests/s, {n} caller{'' if n == '1' else 's'}" for n in TABLE_CALLERS),
    "p99 at 32, ms",
    "p50 with bulk ÷ alone",
    "p99 with bulk ÷ alone",
    "bulk alone, rows/s",
    "bulk kept",
)

Numbers = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class Arm:
    """One server in its best configuration; what was not measured is missing."""

    name: str
    config: str
    callers: Mapping[str, Mapping[str, Sequence[float]]]
    """Number of callers → ``per_s``, ``p50_ms`` and ``p99_ms`` of each run."""
    mix: Mapping[str, Numbers]
    rows_per_s: Sequence[float] = ()
    """Of the plain loop, which serves nobody."""
    ours: bool = False
    errors: int = 0

    def mix_ratio(self, above: str, below: str) -> float:
        """Return the median of two figures' ratio, run by run; NaN where one is missing."""
        pairs = zip(_runs(self.mix.get(above)), _runs(self.mix.get(below)), strict=False)
        return percentile([a / b for a, b in pairs if b], 50)


def read(file: Path) -> list[Arm]:
    """Read the arms; none where there is no file."""
    return arms(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else []


def arms(content: Mapping[str, Any]) -> list[Arm]:
    """Return the arms of a file's content, ours first."""
    found = [
        Arm(
            arm.get("title") or arm["name"],
            arm.get("config") or "",
            arm.get("callers") or {},
            arm.get("mix") or {},
            arm.get("rows_per_s") or (),
            arm["name"] == OURS,
            len(arm.get("errors") or ()),
        )
        for arm in content.get("arms", [])
    ]
    measured = [arm for arm in found if arm.callers or arm.mix or arm.rows_per_s]
    return sorted(measured, key=lambda arm: not arm.ours)


def table(shown: Sequence[Arm]) -> list[str]:
    """Return the comparison as lines of a Markdown table: medians, with lowest and highest run where there are several."""
    lines = [f"| server, its best settings | {' | '.join(_HEAD)} |", "|---|" + "---:|" * len(_HEAD)]
    for arm in shown:
        errors = f"{arm.errors} kinds of errors" if arm.errors else ""
        remarks = ", ".join(filter(None, (arm.config, errors)))
        lines.append(f"| {arm.name}{f' ({remarks})' if remarks else ''} | {' | '.join(_cells(arm))} |")
    return lines + few_calls([count for arm in shown for count in _runs(arm.mix.get("calls"))])


def few_calls(counts: Sequence[float]) -> list[str]:
    """Say on how many calls the mix's percentiles stand; nothing where none were counted."""
    if not counts:
        return []
    few = f"The mix has {min(counts):.0f} calls an arm or more: its 99th percentile is close to the slowest call."
    return ["", few]


def _cells(arm: Arm) -> Iterator[str]:
    for callers in TABLE_CALLERS:
        yield spread(_runs(arm.callers.get(callers, {}).get("per_s")))
    yield spread(_runs(arm.callers.get("32", {}).get("p99_ms")))
    yield spread([arm.mix_ratio("bulk_p50_ms", "alone_p50_ms")])
    yield spread([arm.mix_ratio("bulk_p99_ms", "alone_p99_ms")])
    yield spread(_runs(arm.mix.get("bulk_rows_per_s_alone")) or arm.rows_per_s)
    yield spread([arm.mix_ratio("bulk_rows_per_s_shared", "bulk_rows_per_s_alone")])


def spread(runs: Sequence[float]) -> str:
    """Return median and, for several runs, lowest and highest; a dash where nothing was measured."""
    measured = [run for run in runs if math.isfinite(run)]
    if not measured:
        return "-"
    middle = number(percentile(measured, 50))
    return f"{middle} ({number(min(measured))} to {number(max(measured))})" if len(measured) > 1 else middle


def _runs(value: Numbers | None) -> list[float]:
    if value is None:
        return []
    return [float(value)] if isinstance(value, int | float) else [float(one) for one in value]


def draw(shown: Sequence[Arm], file: Path) -> None:
    """Draw throughput and 99th percentile over the callers for every server."""
    # Imported late: only pictures need matplotlib.
    from benchmarks.painting import BLUE, callers_axis, canvas, colours, line

    shown = [arm for arm in shown if arm.callers]
    with canvas(file, "Servers with the same model file, texts and load generator, one after another", 1, 2) as grid:
        for arm, other in zip(shown, colours(len(shown)), strict=True):
            counts = sorted(map(int, arm.callers))
            for axis, name in zip(grid[0], ("per_s", "p99_ms"), strict=True):
                measured = [n for n in counts if arm.callers[str(n)].get(name)]
                if measured:
                    colour = BLUE if arm.ours else other
                    line(axis, measured, [arm.callers[str(n)][name] for n in measured], arm.name, colour)
        everywhere = sorted({int(n) for arm in shown for n in arm.callers})
        for axis, unit in zip(grid[0], ("requests/s", "p99, ms"), strict=True):
            callers_axis(axis, everywhere, unit)
        grid[0][0].set_ylim(bottom=0)
        grid[0][1].set_yscale("log")
