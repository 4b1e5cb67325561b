"""Triton alone, by its own perf_analyzer with real token ids."""

import asyncio
import tempfile
from pathlib import Path

from benchmarks import perf_analyzer
from benchmarks.bench import Bench, Section
from benchmarks.perf_analyzer import NotAvailable, PerfRow
from benchmarks.stats import Figure


async def measure(bench: Bench) -> Section:
    """Run perf_analyzer for each number of callers; where it cannot be had, the section says so in a line."""
    section = Section("perf", "Triton by perf_analyzer (gRPC, one row a call, real token ids)")
    try:
        binary = await asyncio.to_thread(perf_analyzer.fetch, bench.cache / "perf", bench.triton_venv)
        with tempfile.TemporaryDirectory(prefix="twodoor-perf-") as folder:
            rows = await _rows(bench, section, binary, Path(folder) / "rows.json")
    except NotAvailable as exc:
        section.notes.append(f"not measured: {exc}")
        return section
    for callers in bench.plan.perf_callers:
        runs = [row for row in rows if row.callers == callers]
        label = f"{callers} caller{'s' if callers > 1 else ''}"
        section.figures += [
            Figure(label, "inferences/s", tuple(run.per_s for run in runs)),
            Figure(f"{label}: p50", "ms", tuple(run.p50_ms for run in runs)),
            Figure(f"{label}: p99", "ms", tuple(run.p99_ms for run in runs)),
            Figure(f"{label}: mean in Triton's queue", "ms", tuple(run.queue_ms for run in runs)),
            Figure(f"{label}: mean in the model", "ms", tuple(run.compute_ms for run in runs)),
        ]
    section.data = {
        "callers": list(bench.plan.perf_callers),
        "per_s": [[row.per_s for row in rows if row.callers == callers] for callers in bench.plan.perf_callers],
    }
    return section


async def _rows(bench: Bench, section: Section, binary: Path, file: Path) -> list[PerfRow]:
    length, count = perf_analyzer.write_input(bench.corpus.tensors(bench.spec), file)
    section.notes.append(f"{count} real rows of {length} padded tokens, the commonest length here")
    shape = dict.fromkeys(bench.spec.inputs, length)
    rows = []
    for number in range(bench.plan.perf_rounds):
        for callers in bench.plan.perf_callers:
            bench.say(f"perf: {callers} callers, round {number + 1} of {bench.plan.perf_rounds}")
            async with bench.watched(section):
                rows.append(
                    await asyncio.to_thread(
                        perf_analyzer.measure,
                        binary, bench.stack.triton, bench.spec.name, file, shape, callers, bench.plan.perf_window_ms,
                    )
                )  # fmt: skip
    return rows
