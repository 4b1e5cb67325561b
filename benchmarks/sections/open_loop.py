"""`/predict` at fixed rates, whether earlier calls were answered or not; latency from the intended start."""

from benchmarks.bench import Bench, Section
from benchmarks.load import steady
from benchmarks.stats import Figure, percentile

PERCENTS = (50, 90, 99, 99.9)


async def measure(bench: Bench) -> Section:
    """Measure each rate in as many runs as the plan says, the rates taking turns."""
    section = Section("open", "`/predict` at fixed rates (open loop), latency from the intended start")
    plan = bench.plan
    runs: dict[float, list[list[float]]] = {rate: [] for rate in plan.open_rates_per_s}
    for number in range(plan.open_rounds):
        for rate in plan.open_rates_per_s:
            bench.say(f"open: {rate:g} calls/s, round {number + 1} of {plan.open_rounds}")
            result = await bench.open(section, f"{rate:g} calls/s", bench.predict, steady(rate, plan.open_s))
            runs[rate].append([percentile(result.latencies_ms, percent) for percent in PERCENTS])
    for rate, measured in runs.items():
        for column, percent in enumerate(PERCENTS):
            section.figures.append(
                Figure(f"{rate:g} calls/s: p{percent:g}", "ms", tuple(run[column] for run in measured))
            )
    section.data = {"rates": list(runs), "percents": list(PERCENTS), "runs": list(runs.values())}
    return section
