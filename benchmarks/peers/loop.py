"""The ceiling: the plain ONNX Runtime loop over the same rows sorted by length."""

from benchmarks import plain_loop
from benchmarks.machine import cores
from benchmarks.peers.measure import Arm, Session
from benchmarks.plain_loop import LoopShape, loop_shapes


async def measure(session: Session, arm: Arm) -> None:
    """Run the loop once in each shape; the fastest one counts."""
    found: dict[LoopShape, float] = {}
    rows = sorted((row.ids for row in session.served.corpus.rows), key=len)
    for shape in loop_shapes(cores())[: session.plan.loop_shapes]:
        session.say(f"{arm.name}: {shape}")
        served = session.served
        found[shape] = await plain_loop.run(
            session.workers, served.folder, served.spec, rows, shape, lambda: session.watched(arm)
        )
    best = max(found, key=lambda shape: found[shape])
    arm.rows_per_s.append(found[best])
    arm.config = f"{best}, rows sorted by length"
