"""A thousand callers at once, callers over the bound who come back when told to, and ten thousand open connections."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from benchmarks.bench import Bench, Section
from benchmarks.callers import Expected, post
from benchmarks.herd import REFUSED, AtOnce, Crowded, CrowdSeen, Herd, Try, run_crowd, run_herd
from benchmarks.jobs import Closed, Predict
from benchmarks.load import LoadResult
from benchmarks.own_gateway import OwnGateway, own_gateway
from benchmarks.stats import Bar, Figure, paired_ratio, percentile
from serving.settings import GatewaySettings, env_names, load

TIMEOUT_S = 120.0
THROUGHPUT_CALLERS = 128
LAST_BAR = Bar(1.2, at_least=False)
ALL_BAR = Bar(1.0)
OBEYED_BAR = Bar(0.95)
AS_BEFORE_BAR = Bar(1.2, at_least=False)
MIB = 2**20
_ROWS = env_names(GatewaySettings)["max_admitted_rows"]


@dataclass(slots=True)
class _Runs:
    """One list of values for each figure, a value a round."""

    of: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    told: Counter[int] = field(default_factory=Counter)
    connections: int = 0

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.of[name].append(value)


async def measure(bench: Bench) -> Section:
    """Measure the herds in rounds, each with gateways of its own, so that none has learned from the round before."""
    plan = bench.plan.herd
    section = Section("herd", f"Herd: {plan.callers} callers at once, and {plan.connections} open connections")
    runs = _Runs()
    for number in range(plan.rounds):
        bench.say(f"herd: round {number + 1} of {plan.rounds}")
        async with own_gateway(bench.stack, {_ROWS: plan.callers}) as gateway:
            await _whole_herd(bench, section, gateway, runs)
        async with own_gateway(bench.stack, {_ROWS: plan.bound} if plan.bound else {}) as gateway:
            await _over_the_bound(bench, section, gateway, runs)
            await _crowd(bench, section, gateway, runs)
    section.figures = _figures(bench, runs)
    section.notes += _notes(bench, runs)
    section.data = {"told": sorted(runs.told.items()), **runs.of}
    return section


async def _whole_herd(bench: Bench, section: Section, gateway: OwnGateway, runs: _Runs) -> None:
    """Throughput first, then as many callers as the bound, then the service as it is afterwards."""
    callers = bench.plan.herd.callers
    throughput = await _closed(bench, section, gateway, min(THROUGHPUT_CALLERS, callers))
    before, memory, files = await _alone(bench, section, gateway), gateway.memory_bytes, gateway.open_files
    herd = await _at_once(bench, section, gateway, callers, tries=1)
    peak = gateway.peak_memory_bytes
    after = await _alone(bench, section, gateway)
    runs.add(
        per_s=throughput,
        last_s=herd.last_s,
        ideal_s=callers / throughput if throughput else float("nan"),
        answered=herd.statuses()["200"] / callers,
        p50_before_ms=before,
        p50_after_ms=after,
        memory_before=memory / MIB,
        memory_at=peak / MIB,
        files_left=gateway.open_files - files,
    )


async def _over_the_bound(bench: Bench, section: Section, gateway: OwnGateway, runs: _Runs) -> None:
    """More callers than the bound: those who are refused come back once, exactly when they were told to."""
    bound = bench.plan.herd.bound or load(GatewaySettings).max_admitted_rows
    await _closed(
        bench, section, gateway, min(THROUGHPUT_CALLERS, bound)
    )  # a service that has worked before knows its rate
    herd = await _at_once(bench, section, gateway, bound + bench.plan.herd.over_bound, tries=2)
    first, refused = herd.statuses(0), [one for one in herd.nth(0) if one.status in REFUSED]
    runs.told.update(one.retry_after_s for one in refused if one.retry_after_s is not None)
    runs.add(
        at_first=first["200"] / bound,
        refused=len(refused),
        obeyed=herd.statuses(1)["200"] / len(refused) if refused else float("nan"),
    )


async def _crowd(bench: Bench, section: Section, gateway: OwnGateway, runs: _Runs) -> None:
    """Connections that rest, a caller beside them, then a call on all of them at once."""
    plan, memory, files = bench.plan.herd, gateway.memory_bytes, gateway.open_files
    alone_ms = await _alone(bench, section, gateway)
    job = Crowded(gateway.address, plan.connections, _requests(bench, gateway, 1), plan.beside, TIMEOUT_S)
    async with bench.watched(section):
        seen: CrowdSeen = await bench.workers.run("gateway", run_crowd, job, 3 * TIMEOUT_S)
    everyone = Herd([[one] for one in seen.all_at_once])
    section.check("callers beside open connections", seen.beside.faults)
    section.check("open connections", everyone.faults)
    runs.connections = seen.connections
    most = gateway.peak_memory_bytes
    beside = [(one.done_s - one.sent_s) * 1000 for one in seen.beside.nth(0)]
    runs.add(
        kept_open=seen.still_open / seen.connections,
        p50_crowd_ms=percentile(beside, 50),
        p50_alone_ms=alone_ms,
        crowd_answered=everyone.statuses()["200"],
        crowd_refused=sum(one.status in REFUSED for one in seen.all_at_once),
        memory_crowd=(most - memory) / MIB,
        p50_after_crowd_ms=await _alone(bench, section, gateway),
        files_left_crowd=gateway.open_files - files,
    )


async def _at_once(bench: Bench, section: Section, gateway: OwnGateway, callers: int, *, tries: int) -> Herd:
    job = AtOnce(gateway.address, _requests(bench, gateway, callers), tries, TIMEOUT_S)
    async with bench.watched(section):
        herd: Herd = await bench.workers.run("gateway", run_herd, job, 3 * TIMEOUT_S)
    section.check(f"{callers} callers at once", herd.faults + _wrong(bench, herd))
    return herd


def _wrong(bench: Bench, herd: Herd) -> Counter[str]:
    """Count wrong answers among those that came."""
    expected = bench.corpus.expected
    found: Counter[str] = Counter()
    for caller, tries in enumerate(herd.callers):
        for one in tries:
            if one.status == 200 and (fault := _fault(expected[caller % len(expected)], one)):
                found[fault] += 1
    return found


def _fault(expected: Expected, answer: Try) -> str:
    found = orjson.loads(answer.body)
    return expected.fault(found["sentiment"] == "positive", found["score"])


def _requests(bench: Bench, gateway: OwnGateway, callers: int) -> list[bytes]:
    texts, (host, port) = bench.corpus.texts, gateway.address
    return [
        post("/predict", orjson.dumps({"text": texts[number % len(texts)]}), f"{host}:{port}")
        for number in range(callers)
    ]


async def _closed(bench: Bench, section: Section, gateway: OwnGateway, callers: int) -> float:
    return (await _loop(bench, section, gateway, callers)).per_s


async def _alone(bench: Bench, section: Section, gateway: OwnGateway) -> float:
    """Return the median latency of one caller, in ms."""
    return percentile((await _loop(bench, section, gateway, 1)).latencies_ms, 50)


async def _loop(bench: Bench, section: Section, gateway: OwnGateway, callers: int) -> LoadResult:
    target = Predict(gateway.address, bench.corpus.texts, bench.corpus.expected)
    job = Closed(target, callers, bench.plan.warm_s, bench.plan.herd.seconds)
    return await bench.closed_job(section, "gateway", "own gateway", job)


def _figures(bench: Bench, runs: _Runs) -> list[Figure]:
    plan, of = bench.plan.herd, runs.of
    herd = f"{plan.callers} callers, bound {plan.callers} rows"
    over = f"bound {plan.bound or 'as by default'}, {plan.over_bound} callers more"
    crowd = f"{runs.connections} open connections"

    def plain(name: str, unit: str, key: str, bar: Bar | None = None) -> Figure:
        return Figure(name, unit, tuple(of[key]), bar)

    return [
        plain(f"{herd}: share answered 200", "ratio", "answered", ALL_BAR),
        paired_ratio(f"{herd}: last answer ÷ ({plan.callers} ÷ throughput)", of["last_s"], of["ideal_s"], LAST_BAR),
        plain(f"{herd}: last answer", "s", "last_s"),
        plain(f"throughput at {THROUGHPUT_CALLERS} callers", "requests/s", "per_s"),
        paired_ratio(
            "one caller's p50, after the herd ÷ before", of["p50_after_ms"], of["p50_before_ms"], AS_BEFORE_BAR
        ),
        plain("memory of the gateway before the herd", "MiB", "memory_before"),
        plain("most memory of the gateway in the herd", "MiB", "memory_at"),
        plain("open files more than before the herd", "files", "files_left"),
        plain(f"{over}: answered at the first try ÷ bound", "ratio", "at_first", ALL_BAR),
        plain(f"{over}: refused", "callers", "refused"),
        plain(f"{over}: of those, answered when they came back as told", "ratio", "obeyed", OBEYED_BAR),
        plain(f"{crowd}: share still open while callers call", "ratio", "kept_open", ALL_BAR),
        paired_ratio(f"{crowd}: one caller's p50 beside ÷ alone", of["p50_crowd_ms"], of["p50_alone_ms"]),
        plain(f"{crowd}, a call on each at once: answered 200", "callers", "crowd_answered"),
        plain(f"{crowd}, a call on each at once: told when to come back", "callers", "crowd_refused"),
        plain(f"{crowd}: memory of the gateway, more than before", "MiB", "memory_crowd"),
        paired_ratio(
            f"{crowd}: one caller's p50, after ÷ before", of["p50_after_crowd_ms"], of["p50_alone_ms"], AS_BEFORE_BAR
        ),
        plain("open files more than before the connections", "files", "files_left_crowd"),
    ]


def _notes(bench: Bench, runs: _Runs) -> list[str]:
    plan = bench.plan.herd
    notes = [
        (
            "Every caller has a connection of its own and sends at the same moment; every 200 is checked; a reset, another "
            "status or a refusal without Retry-After counts as an error."
        ),
        f"Told to come back after: {_spread(sorted(runs.told.items()))}. Callers come exactly then, without jitter.",
    ]
    if runs.connections < plan.connections:
        notes.append(
            f"The hard limit of open files allows {runs.connections} connections instead of {plan.connections}."
        )
    return notes


def _spread(told: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{seconds} s {count} x" for seconds, count in told) or "nobody"
