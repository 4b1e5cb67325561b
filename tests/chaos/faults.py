"""Carries a fault out: waits until it would hit something, breaks it, and takes it back."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable

import psutil

from tests.chaos.arena import Arena
from tests.chaos.load import Load
from tests.chaos.plan import Fault, Hit

HIT_WAIT_S = 15.0
READY_S = 90.0


async def inject(arena: Arena, load: Load, fault: Fault) -> bool:
    """Break, hold, mend; returns whether the fault hit what it was meant to hit. All is ready again afterwards."""
    hit = await asyncio.to_thread(arena.wait_for, _meets(arena, load, fault.hits), HIT_WAIT_S)
    await _ACTIONS[fault.what](arena, load, fault)
    await asyncio.to_thread(arena.wait_ready, timeout_s=READY_S)
    return hit


def _meets(arena: Arena, load: Load, hits: Hit) -> Callable[[], bool]:
    if hits is Hit.CHUNK:
        return lambda: arena.leased_chunks() > 0
    if hits is Hit.UPLOAD:
        return lambda: arena.open_uploads() > 0
    if hits is Hit.RECORD:
        return lambda: arena.uncommitted_records() > 0
    return lambda: load.calls_in_flight > 0


async def _kill(arena: Arena, load: Load, fault: Fault) -> None:
    name = "triton" if fault.target == "model process" else fault.target
    before = arena.stack.pid(name)
    await asyncio.to_thread(arena.kill, fault.target)
    if fault.target != "model process":
        await asyncio.to_thread(arena.stack.wait_ready, name, READY_S, before)


async def _stop(arena: Arena, load: Load, fault: Fault) -> None:
    pid = arena.stack.pid(fault.target)
    group = os.getpgid(pid) if fault.target == "postgres" else None
    # PostgreSQL's sessions are processes of their own: all of them stop.
    pids = _members(pid) if group is not None else [pid]
    for one in pids:
        os.kill(one, signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        for one in reversed(pids):
            try:
                os.kill(one, signal.SIGCONT)
            except ProcessLookupError:
                continue  # it was replaced meanwhile


def _members(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


async def _restart(arena: Arena, load: Load, fault: Fault) -> None:
    await asyncio.to_thread(arena.stack.restart, fault.target)


async def _move(arena: Arena, load: Load, fault: Fault) -> None:
    await asyncio.to_thread(arena.stack.stop_service, "consumer-2")
    await asyncio.sleep(fault.hold_s)
    await asyncio.to_thread(arena.stack.start_service, "consumer-2")


async def _wipe(arena: Arena, load: Load, fault: Fault) -> None:
    """Lose Kafka with all it holds. Records count only if they are produced afterwards, so some are."""
    await asyncio.to_thread(arena.stack.stop_service, "kafka")
    await asyncio.to_thread(shutil.rmtree, arena.stack.home / "kafka")
    await asyncio.to_thread(arena.stack.start_service, "kafka")
    load.forget_records()
    arena.results_from = {}
    await load.produce(f"{load.name}-after-wipe", 60)


async def _break_store(arena: Arena, load: Load, fault: Fault) -> None:
    arena.store.fault(fault.what)
    try:
        await asyncio.sleep(fault.hold_s)
    finally:
        arena.store.heal()


_ACTIONS = {
    "kill": _kill,
    "stop": _stop,
    "restart": _restart,
    "move": _move,
    "wipe": _wipe,
    "refuse": _break_store,
    "reset": _break_store,
    "slow": _break_store,
    "fill": _break_store,
}
