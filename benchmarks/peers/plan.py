"""How long each thing is measured, and which configurations a peer is tried in."""

from dataclasses import dataclass

from benchmarks.machine import cores


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """Numbers of one run. A round has each number of callers once."""

    texts: int
    trial_callers: int
    callers: tuple[int, ...]
    rounds: int
    warm_s: float
    trial_s: float
    closed_s: float
    mix_calls_per_s: float
    mix_s: float
    bulk_callers: int
    bulk_alone_s: float
    topic_backlog: int
    visits: int
    """How often in a run Twodoor, its own Triton and the plain loop are measured: at its begin, middle and end."""
    batchings: tuple[bool, ...] = (True, False)
    waits_ms: tuple[int, ...] = (5, 1)
    """How long a batch may wait for its next row, where a framework lets one say it."""
    shapes: int = 2
    loop_shapes: int = 6
    """How many shapes of the plain loop run; the fastest counts."""


FULL = PeerPlan(
    texts=2_000,
    trial_callers=32,
    callers=(1, 32, 128),
    rounds=3,
    warm_s=0.5,
    trial_s=1.5,
    closed_s=2.5,
    mix_calls_per_s=6.0,
    mix_s=14.0,
    bulk_callers=32,
    bulk_alone_s=5.0,
    topic_backlog=2_000,
    visits=3,
)
SHORT = PeerPlan(
    texts=128,
    trial_callers=4,
    callers=(1, 8),
    rounds=1,
    warm_s=0.1,
    trial_s=0.4,
    closed_s=0.4,
    mix_calls_per_s=6.0,
    mix_s=1.0,
    bulk_callers=4,
    bulk_alone_s=0.5,
    topic_backlog=200,
    visits=1,
    batchings=(True,),
    waits_ms=(5,),
    shapes=1,
    loop_shapes=2,
)


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a peer on this machine."""

    processes: int
    threads: int
    batching: bool
    wait_ms: int | None = None
    """How long a batch may wait for its next row; None where that is not ours to say."""

    def __str__(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        waits = "" if self.wait_ms is None else f" within {self.wait_ms} ms"
        return f"{processes} x {threads}, batching {'on' if self.batching else 'off'}{waits}"


def configs(plan: PeerPlan, *, waits: bool = True) -> list[Config]:
    """Return every configuration: one process with all cores' threads or a process a core, with batching and without.

    ``waits``: whether one can say how long a batch waits for its rows.
    """
    count = cores()
    shapes = [(1, count), (count, 1)] if count > 1 else [(1, 1)]
    return [
        Config(*shape, batching, wait_ms)
        for batching in plan.batchings
        for wait_ms in (plan.waits_ms if waits and batching else (None,))
        for shape in shapes[: plan.shapes]
    ]
