"""`/predict` in a closed loop, by turns with the same tensors straight to Triton."""

from collections import defaultdict

from benchmarks.bench import Bench, Data, Section
from benchmarks.jobs import Target
from benchmarks.load import LoadResult
from benchmarks.machine import cores
from benchmarks.stats import Bar, Figure, paired_difference, paired_ratio, percentile

PER_S_BAR = Bar(1.0)
P99_BAR = Bar(1.0, at_least=False)
BAR_CALLERS = (32, 128)
ADDED_BAR_MS = Bar(2.0, at_least=False)
PERCENTS = (50, 99, 99.9)
CURVE_PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9)

Runs = dict[int, list[LoadResult]]


async def measure(bench: Bench) -> Section:
    """Measure each number of callers in rounds of gateway and Triton; every other round turns their order round."""
    section = Section("predict", "`/predict`, one text a call, beside the same tensors straight to Triton by gRPC")
    targets: dict[str, Target] = {"gateway": bench.predict, "direct": bench.direct()}
    arms: dict[str, Runs] = {arm: defaultdict(list) for arm in targets}
    for callers in bench.plan.callers:
        for number in range(bench.plan.predict_rounds):
            bench.say(f"predict: {callers} callers, round {number + 1} of {bench.plan.predict_rounds}")
            for arm in ("gateway", "direct") if number % 2 == 0 else ("direct", "gateway"):
                arms[arm][callers].append(await bench.closed(section, arm, targets[arm], callers))
    for callers in bench.plan.callers:
        section.figures += _figures(callers, arms["gateway"][callers], arms["direct"][callers])
    section.notes += _notes(arms["gateway"], arms["direct"])
    section.data = {
        "callers": list(bench.plan.callers),
        "curve_percents": list(CURVE_PERCENTS),
        **{arm: _data(runs, bench.plan.callers) for arm, runs in arms.items()},
    }
    return section


def _figures(callers: int, gateway: list[LoadResult], direct: list[LoadResult]) -> list[Figure]:
    label = f"{callers} caller{'s' if callers > 1 else ''}"
    gateway_per_s, direct_per_s = ([run.per_s for run in runs] for runs in (gateway, direct))
    per_s_bar, p99_bar = (PER_S_BAR, P99_BAR) if callers in BAR_CALLERS else (None, None)
    p99_ms = [_percentiles(runs, 99) for runs in (gateway, direct)]
    figures = [
        paired_ratio(f"{label}: gateway ÷ Triton direct, requests/s", gateway_per_s, direct_per_s, per_s_bar),
        Figure(f"{label}: gateway", "requests/s", tuple(gateway_per_s)),
        Figure(f"{label}: Triton direct", "requests/s", tuple(direct_per_s)),
        paired_ratio(f"{label}: p99, gateway ÷ Triton direct", p99_ms[0], p99_ms[1], p99_bar),
    ]
    if callers in BAR_CALLERS:
        ours, theirs = ([run.per_s_of_cores_left(cores()) for run in runs] for runs in (gateway, direct))
        figures.append(
            paired_ratio(f"{label}: the same, for each core that the callers leave", ours, theirs, headline=True)
        )
    if callers == 1:
        added = "1 caller: added to Triton direct's p50"
        figures.append(
            paired_difference(added, "ms", _percentiles(gateway, 50), _percentiles(direct, 50), ADDED_BAR_MS)
        )
    for percent in PERCENTS:
        for arm, runs in (("gateway", gateway), ("Triton direct", direct)):
            figures.append(Figure(f"{label}: {arm} p{percent:g}", "ms", tuple(_percentiles(runs, percent))))
    return figures


def _percentiles(runs: list[LoadResult], percent: float) -> list[float]:
    return [percentile(run.latencies_ms, percent) for run in runs]


def _data(runs: Runs, callers: tuple[int, ...]) -> Data:
    return {
        "per_s": [[run.per_s for run in runs[n]] for n in callers],
        "p50_ms": [_percentiles(runs[n], 50) for n in callers],
        "p99_ms": [_percentiles(runs[n], 99) for n in callers],
        "curves_ms": [[[percentile(run.latencies_ms, p) for p in CURVE_PERCENTS] for run in runs[n]] for n in callers],
    }


def _notes(*arms: Runs) -> list[str]:
    runs = [run for arm in arms for results in arm.values() for run in results]
    gateway = [run.cpu_s / run.calls * 1e6 for results in arms[0].values() for run in results if run.calls]
    direct = [run.cpu_s / run.calls * 1e6 for results in arms[1].values() for run in results if run.calls]
    return [
        f"{sum(run.calls for run in runs)} calls, every answer checked against the model's own file in plain ONNX Runtime.",
        (
            f"The load generator's own CPU for a call, on the same cores: {percentile(gateway, 50):.0f} µs by HTTP, "
            f"{percentile(direct, 50):.0f} µs by tritonclient (tensors made beforehand)."
        ),
        "A 99.9th percentile of fewer than a thousand calls is close to the slowest one.",
    ]
