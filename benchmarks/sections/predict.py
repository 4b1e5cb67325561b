"""`/predict` in a closed loop, by turns with the same tensors straight to Triton."""

from collections import defaultdict

from benchmarks.bench import Bench, Section
from benchmarks.load import LoadResult
from benchmarks.stats import Bar, Figure, paired_ratio, percentile

BAR_CALLERS = 32
BAR = Bar(0.6)


async def measure(bench: Bench) -> Section:
    """Measure each number of callers in rounds of gateway, then Triton."""
    section = Section("predict", "`/predict`, one text a call, beside the same tensors straight to Triton by gRPC")
    direct = bench.direct()
    arms: dict[str, dict[int, list[LoadResult]]] = {"gateway": defaultdict(list), "direct": defaultdict(list)}
    for callers in bench.plan.callers:
        for number in range(bench.plan.predict_rounds):
            bench.say(f"predict: {callers} callers, round {number + 1} of {bench.plan.predict_rounds}")
            arms["gateway"][callers].append(await bench.closed(section, "gateway", bench.predict, callers))
            arms["direct"][callers].append(await bench.closed(section, "direct", direct, callers))
    for callers in bench.plan.callers:
        section.figures += _figures(callers, arms["gateway"][callers], arms["direct"][callers])
    section.notes += _notes(arms["gateway"], arms["direct"])
    section.data = {
        "callers": list(bench.plan.callers),
        **{
            arm: {
                "per_s": [[run.per_s for run in runs[n]] for n in bench.plan.callers],
                "p50_ms": [[percentile(run.latencies_ms, 50) for run in runs[n]] for n in bench.plan.callers],
                "p99_ms": [[percentile(run.latencies_ms, 99) for run in runs[n]] for n in bench.plan.callers],
            }
            for arm, runs in arms.items()
        },
    }
    return section


def _figures(callers: int, gateway: list[LoadResult], direct: list[LoadResult]) -> list[Figure]:
    label = f"{callers} caller{'s' if callers > 1 else ''}"
    gateway_per_s, direct_per_s = ([run.per_s for run in runs] for runs in (gateway, direct))
    name = f"{label}: gateway ÷ Triton direct, requests/s"
    figures = [
        paired_ratio(name, gateway_per_s, direct_per_s, BAR if callers == BAR_CALLERS else None),
        Figure(f"{label}: gateway", "requests/s", tuple(gateway_per_s)),
        Figure(f"{label}: Triton direct", "requests/s", tuple(direct_per_s)),
    ]
    for percent in (50, 99):
        for arm, runs in (("gateway", gateway), ("Triton direct", direct)):
            values = tuple(percentile(run.latencies_ms, percent) for run in runs)
            figures.append(Figure(f"{label}: {arm} p{percent}", "ms", values))
    return figures


def _notes(*arms: dict[int, list[LoadResult]]) -> list[str]:
    runs = [run for arm in arms for results in arm.values() for run in results]
    gateway = [run.cpu_s / run.calls * 1e6 for results in arms[0].values() for run in results if run.calls]
    direct = [run.cpu_s / run.calls * 1e6 for results in arms[1].values() for run in results if run.calls]
    return [
        f"{sum(run.calls for run in runs)} calls, every answer checked against the model's own file in plain ONNX Runtime.",
        (
            f"The load generator's own CPU for a call, on the same cores: {percentile(gateway, 50):.0f} µs by HTTP, "
            f"{percentile(direct, 50):.0f} µs by tritonclient (tensors made beforehand)."
        ),
    ]
