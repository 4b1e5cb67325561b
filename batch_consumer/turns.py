"""Whose turn it is: topic and jobs alternate by rows, so do tenants by weight, and jobs within a tenant. Pure."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

# How far rows that only filled up somebody else's micro-batch may put a feeder behind: a few micro-batches.
MAX_AHEAD_ROWS = 256
_PRUNE_OVER = 256

Path = tuple[object, ...]


class Feeder(NamedTuple):
    """Where rows come from, as a path of three levels. The tenant's ``weight`` is its share among tenants."""

    kind: str
    tenant: str = ""
    job: str = ""
    weight: float = 1.0


TOPIC = Feeder("topic")


def job_feeder(tenant: str, weight: float, job: str) -> Feeder:
    """Return the feeder of a job's rows."""
    return Feeder("jobs", tenant, job, weight)


class Turns:
    """Virtual times: rows served so far (÷ weight), kept for each node of the tree of feeders.

    The turn is the active child's with the least time, level by level. A node that wakes starts level with the least
    of its active siblings, or keeps what it is ahead: sleeping neither saves up turns nor wipes out what was had.
    """

    def __init__(self) -> None:
        self._times: dict[Path, float] = {}
        self._floors: dict[Path, float] = {}
        """By parent: the time of the child whose turn was last. No active child's time is less."""

    def wake(self, feeder: Feeder, active: Collection[Feeder]) -> None:
        """Say that a feeder has rows again beside the ``active`` ones."""
        for level in (1, 2, 3):
            node, parent = feeder[:level], feeder[: level - 1]
            siblings = [self._times[one[:level]] for one in active if one[: level - 1] == parent]
            least = min(siblings, default=self._floors.get(parent, 0.0))
            self._times[node] = max(self._times.get(node, 0.0), least)

    def sleep(self, feeder: Feeder, active: Collection[Feeder]) -> None:
        """Say that a feeder has no rows any more, while the ``active`` ones still have some.

        Where all siblings sleep, nobody is ahead of anybody.
        """
        for level in (3, 2, 1):
            parent = feeder[: level - 1]
            if any(one[: level - 1] == parent for one in active):
                return
            self._floors.pop(parent, None)
            for node in [node for node in self._times if len(node) == level and node[:-1] == parent]:
                del self._times[node]
                self._floors.pop(node, None)

    def order(self, active: Iterable[Feeder]) -> list[Feeder]:
        """Return the feeders that have rows, the one whose turn it is first."""
        times = self._times
        return sorted(active, key=lambda f: (times[f[:1]], f[0], times[f[:2]], f[1], times[f[:3]], f[2]))

    def begin(self, feeder: Feeder) -> None:
        """Say that the turn is this feeder's, the first of ``order``."""
        for level in (1, 2, 3):
            node: Path = feeder[:level]
            self._floors[node[:-1]] = max(self._times[node], self._floors.get(node[:-1], 0.0))

    def served(self, feeder: Feeder, rows: int) -> None:
        """Count rows that a feeder has got out, in its turn or as filling of another's."""
        for level, share in ((1, 1.0), (2, feeder.weight), (3, 1.0)):
            node: Path = feeder[:level]
            most = self._floors.get(node[:-1], 0.0) + max(rows, MAX_AHEAD_ROWS) / share
            self._times[node] = min(self._times[node] + rows / share, max(most, self._times[node]))

    def prune(self, active: Collection[Feeder]) -> None:
        """Forget nodes that sleep and are not ahead, where there are many: they would wake level anyway."""
        if len(self._times) <= _PRUNE_OVER:
            return
        kept: set[Path] = {feeder[:level] for feeder in active for level in (1, 2, 3)}
        for node in sorted(self._times, key=len):
            parent = node[:-1]
            if node in kept or (parent in self._floors and self._times[node] > self._floors[parent]):
                continue
            del self._times[node]
            self._floors.pop(node, None)
