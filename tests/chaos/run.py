"""One chaos run: rounds of load and faults until enough of them counted, with the invariants after each."""

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.arena import Arena
from tests.chaos.faults import inject
from tests.chaos.invariants import check
from tests.chaos.load import Load
from tests.chaos.plan import ALL, Fault, rounds
from tests.chaos.planted import PLANTED
from tests.chaos.report import Report, Round
from tests.chaos.store import FullDisk, Store
from tests.chaos.texts import Answers
from tests.e2e.topics import results_end

# After these rounds, and after the last one, a round without a fault follows, and each process' memory is read.
CALM = (5,)
CALM_S = 10.0
# Of the rounds of a plan at most this many more may hit nothing.
SPARE = 1.5
SITE = Path(__file__).parent / "site"


@dataclass(frozen=True, slots=True)
class Plan:
    """How many counted rounds, and of which faults."""

    rounds: int
    seed: int
    faults: Sequence[Fault] = ALL
    per_round: int = 2
    calm: Sequence[int] = CALM
    planted: str = ""
    end_s: float = 120.0
    """How long after a round's last fault everything accepted may take to end."""

    @property
    def environment(self) -> dict[str, str]:
        """What plants the fault."""
        if not self.planted:
            return {}
        return {"CHAOS_PLANTED": self.planted, "PYTHONPATH": str(SITE)}


async def run(plan: Plan, home: Path, store: Store | FullDisk, report: Report) -> None:
    """Run rounds until enough counted, until something broke, or until too many hit nothing."""
    arena = await asyncio.to_thread(Arena(home, store, plan.environment).__enter__)
    try:
        await asyncio.to_thread(arena.wait_ready)
        if plan.planted:
            await asyncio.to_thread(arena.execute, PLANTED[plan.planted].sql)
        answers = await asyncio.to_thread(Answers.ask, arena.stack.gateway_url)
        dice = random.Random(plan.seed)
        if plan.planted:
            # A fault that shows without any chaos would prove nothing.
            report.add_plain(plan.planted, await _round(arena, answers, dice, f"{plan.planted}-0", (), plan.end_s))
        counted = 0
        for number, faults in enumerate(rounds(plan.seed, plan.faults, plan.per_round), 1):
            if counted >= plan.rounds or number > plan.rounds * SPARE + 2:
                break
            result = await _round(arena, answers, dice, f"{plan.planted or 'sound'}-{number}", faults, plan.end_s)
            report.add(plan.planted, result)
            counted += result.counts
            if result.broken:
                report.keep_logs(arena, plan.planted, number)
                break
            if plan.calm and result.counts and counted in (*plan.calm, plan.rounds):
                await _calm(arena, answers, dice, report, plan.end_s)
    finally:
        await asyncio.to_thread(arena.__exit__, None, None, None)


async def _round(
    arena: Arena, answers: Answers, dice: random.Random, name: str, faults: Sequence[Fault], end_s: float
) -> Round:
    began = time.monotonic()
    arena.results_from = await results_end(arena.stack.kafka)
    load = Load(arena.stack.gateway_url, arena.stack.kafka, answers, dice, name)
    load.start()
    hits = []
    try:
        for fault in faults:
            hits.append(await inject(arena, load, fault))  # noqa: PERF401 (what was hit before one fails is kept)
        if not faults:
            await asyncio.sleep(CALM_S)
    finally:
        await load.end()
    broken = await check(arena, load, end_s)
    return Round(name, [str(fault) for fault in faults], hits, broken, time.monotonic() - began, load.summary())


async def _calm(arena: Arena, answers: Answers, dice: random.Random, report: Report, end_s: float) -> None:
    """Without a fault, the same load: what each process then holds can be compared between two such moments."""
    result = await _round(arena, answers, dice, f"calm-{os.urandom(2).hex()}", (), end_s)
    report.add_calm(result, await asyncio.to_thread(arena.rss_bytes))
