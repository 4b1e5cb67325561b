"""The files of a run: peers.json for programs, peers.md for readers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.load import LoadResult
from benchmarks.peer_figures import few_calls
from benchmarks.peers.measure import Arm
from benchmarks.peers.plan import PeerPlan
from benchmarks.report import OTHERS_NOTE_SHARE, finite, write_whole
from benchmarks.stats import number, percentile

JSON_NAME, TABLE_NAME = "peers.json", "peers.md"
Data = dict[str, object]


@dataclass(frozen=True, slots=True)
class Run:
    """What stands above the figures."""

    started_at: str
    seconds: float
    short: bool
    machine: Mapping[str, object]
    load_before: Mapping[str, float]
    texts: str
    plan: PeerPlan


def write(folder: Path, run: Run, arms: Sequence[Arm]) -> None:
    """Write both files into ``folder``, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "started_at": run.started_at,
        "seconds": round(run.seconds, 1),
        "short": run.short,
        "machine": dict(run.machine),
        "load_before": dict(run.load_before),
        "settings": {"texts": run.texts, "plan": asdict(run.plan)},
        "arms": [_arm(arm) for arm in arms],
    }
    write_whole(folder / JSON_NAME, json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / TABLE_NAME, markdown(run, arms))


def _arm(arm: Arm) -> Data:
    return {
        "name": arm.name,
        "title": arm.title,
        "config": arm.config,
        "versions": arm.versions,
        "trials": [{"config": str(trial.config), "per_s": trial.per_s} for trial in arm.trials],
        "callers": {
            str(callers): {
                "per_s": arm.per_s(callers),
                "p50_ms": arm.latency_ms(callers, 50),
                "p99_ms": arm.latency_ms(callers, 99),
                "calls": [result.calls for result in results],
                "generator_us": [result.cpu_s / max(1, result.calls) * 1e6 for result in results],
                "wrong": [result.wrong.total() for result in results],
            }
            for callers, results in arm.callers.items()
        },
        "mix": mix_of(arm),
        "rows_per_s": arm.rows_per_s,
        "others_cpu_share": arm.others_cpu,
        "errors": arm.errors,
    }


def mix_of(arm: Arm) -> dict[str, float]:
    """Return the mix over all its rounds: percentiles of all calls, medians of the rounds' rows a second."""
    if not arm.mix:
        return {}
    alone = _latencies([part.alone for part in arm.mix])
    beside = _latencies([part.beside for part in arm.mix])
    return {
        "calls": float(len(alone)),
        "alone_p50_ms": percentile(alone, 50),
        "alone_p99_ms": percentile(alone, 99),
        "bulk_p50_ms": percentile(beside, 50),
        "bulk_p99_ms": percentile(beside, 99),
        "bulk_rows_per_s_alone": percentile([part.bulk_alone_per_s for part in arm.mix], 50),
        "bulk_rows_per_s_shared": percentile([part.bulk_shared_per_s for part in arm.mix], 50),
    }


def _latencies(results: Sequence[LoadResult]) -> list[float]:
    return [float(value) for value in np.concatenate([result.latencies_ms for result in results])]


def markdown(run: Run, arms: Sequence[Arm]) -> str:
    """Return the report as a Markdown page."""
    machine = run.machine
    lines = [
        "# Peers on the same model, texts and callers",
        "",
        f"- {run.started_at}, {run.seconds:.0f} s, commit {machine.get('commit')}",
        f"- {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB; {run.texts}",
        f"- before the start: {run.load_before.get('cpu_share', 0):.0%} of all cores in use",
        "",
    ]
    if run.short:
        lines += ["This is the short run: it shows that all works, its figures say nothing about speed.", ""]
    lines += [*table(run.plan, arms), "", *_counts(arms), "", *trials(arms), ""]
    lines += [f"- **wrong:** {arm.name}: {error}" for arm in arms for error in arm.errors]
    worst = max((share for arm in arms for share in arm.others_cpu), default=0.0)
    warning = " — **read these figures with care**" if worst > OTHERS_NOTE_SHARE else ""
    return "\n".join([*lines, f"- Other programs took at most {worst:.0%} of all cores during a run{warning}.", ""])


def _counts(arms: Sequence[Arm]) -> Iterator[str]:
    """Say on how many calls the percentiles stand, and what the callers themselves took of the cores."""
    yield from few_calls([mix_of(arm)["calls"] for arm in arms if arm.mix])
    yield ""
    for arm in arms:
        results = [result for runs in arm.callers.values() for result in runs if result.calls]
        if results:
            used = percentile([result.cpu_s / result.calls * 1e6 for result in results], 50)
            yield f"- {arm.title}: a call costs its callers {used:.0f} µs of CPU, on the same cores."


def table(plan: PeerPlan, arms: Sequence[Arm]) -> list[str]:
    """Return the table of all arms: medians over the rounds."""
    columns = [f"{name} at {callers}" for callers in plan.callers for name in ("calls/s", "p50 ms", "p99 ms")]
    mix = ("alone p50 ms", "alone p99 ms", "beside bulk p50 ms", "beside bulk p99 ms", "bulk rows/s", "kept")
    header = ["server", "configuration", *columns, *mix]
    lines = [_row(header), "|---|---|" + "---:|" * (len(header) - 2)]
    return lines + [_row([arm.title, arm.config, *_figures(plan, arm)]) for arm in arms]


def _figures(plan: PeerPlan, arm: Arm) -> list[str]:
    cells: list[str] = []
    for callers in plan.callers:
        rounds = (arm.per_s(callers), arm.latency_ms(callers, 50), arm.latency_ms(callers, 99))
        cells += [number(percentile(values, 50)) if values else "" for values in rounds]
    mix = mix_of(arm)
    if not mix:
        return [*cells, "", "", "", "", number(percentile(arm.rows_per_s, 50)) if arm.rows_per_s else "", ""]
    cells += [number(mix[name]) for name in ("alone_p50_ms", "alone_p99_ms", "bulk_p50_ms", "bulk_p99_ms")]
    alone = mix["bulk_rows_per_s_alone"]
    return [*cells, number(alone), number(mix["bulk_rows_per_s_shared"] / alone) if alone else "n/a"]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def trials(arms: Sequence[Arm]) -> list[str]:
    """Return a list of what each arm was tried with; the best one is what the table has."""
    lines = []
    for arm in arms:
        tried = "; ".join(f"{trial.config}: {number(trial.per_s)} calls/s" for trial in arm.trials)
        versions = ", ".join(f"{name} {version}" for name, version in arm.versions.items())
        lines += [f"- {arm.title} ({versions}): {tried}"] if tried else []
    return lines
