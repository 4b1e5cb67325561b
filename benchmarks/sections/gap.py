"""The gateway's largest event-loop gap while 1 MB texts come, seen from outside by a fixed rhythm of `/healthz`."""

import asyncio

from benchmarks.bench import Bench, Section
from benchmarks.jobs import LongTexts, Probe, run_long_texts, run_probe
from benchmarks.load import CALL_TIMEOUT_S, LoadResult
from benchmarks.stats import Figure, percentile

INTERVAL_S = 0.005
TEXT_CHARS = 1_000_000


async def measure(bench: Bench) -> Section:
    """Probe a quiet gateway and one that gets long texts, by turns."""
    section = Section("gap", "Largest gap of the gateway's event loop, while it is quiet and while 1 MB texts come")
    job = LongTexts(bench.stack.gateway, long_text(bench.corpus.texts), bench.plan.gap_s)
    limit_s = bench.plan.gap_s + 2 * CALL_TIMEOUT_S + 30
    runs: dict[str, list[LoadResult]] = {"quiet": [], "1 MB texts": []}
    sent: list[LoadResult] = []
    for number in range(bench.plan.gap_rounds):
        bench.say(f"gap: round {number + 1} of {bench.plan.gap_rounds}")
        runs["quiet"].append(await _probe(bench, section, "quiet"))
        loaded, texts = await asyncio.gather(
            _probe(bench, section, "1 MB texts"), bench.workers.run("long-texts", run_long_texts, job, limit_s)
        )
        runs["1 MB texts"].append(loaded)
        sent.append(texts)
        section.check("1 MB texts", texts.wrong)
    for name, results in runs.items():
        for label, percent in (("largest", 100.0), ("p99", 99.0), ("p50", 50.0)):
            values = tuple(percentile(result.latencies_ms, percent) for result in results)
            section.figures.append(Figure(f"{name}: {label}", "ms", values))
    section.notes = _notes(sent)
    section.data = {
        name: {
            "at_s": (results[0].done_at_s - results[0].done_at_s[0]).tolist(),
            "ms": results[0].latencies_ms.tolist(),
        }
        for name, results in runs.items()
        if results[0].calls
    }
    return section


def _notes(sent: list[LoadResult]) -> list[str]:
    times_ms = [value for result in sent for value in result.latencies_ms.tolist()]
    return [
        (
            f"`GET /healthz` every {INTERVAL_S * 1000:g} ms over one connection, latency from the intended start: an upper "
            "bound of the gap, since it holds the network and the wait for a core as well."
        ),
        (
            f"{len(times_ms)} texts of {TEXT_CHARS} characters were sent meanwhile, one at a time: cut ones were answered, "
            f"whole ones refused as `text_too_long`; p50 {percentile(times_ms, 50):.0f} ms."
        ),
    ]


async def _probe(bench: Bench, section: Section, where: str) -> LoadResult:
    job = Probe(bench.stack.gateway, INTERVAL_S, bench.plan.gap_s)
    async with bench.watched(section):
        result = await bench.workers.run("gateway", run_probe, job, bench.plan.gap_s + 2 * CALL_TIMEOUT_S + 30)
    section.check(f"/healthz, {where}", result.wrong)
    return result


def long_text(texts: tuple[str, ...]) -> str:
    """Return a text of 1,000,000 ASCII characters of real words."""
    joined = " ".join(texts).encode("ascii", "ignore").decode()
    return (joined + " ") * (TEXT_CHARS // (len(joined) + 1)) + (joined + " ")[: TEXT_CHARS % (len(joined) + 1)]
