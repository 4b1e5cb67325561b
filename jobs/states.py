"""A job's states and the only ways from one to the next. Pure."""

from enum import Enum


class Status(Enum):
    """Where a job is. ``EXPIRING`` and ``FAILING`` are our own: callers see them as ``running``."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    EXPIRING = "expiring"
    FAILING = "failing"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def shown(self) -> str:
        """The status as callers know it."""
        return Status.RUNNING.value if self in (Status.EXPIRING, Status.FAILING) else self.value

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to a job in this state."""
        return not NEXT[self]

    @property
    def runs(self) -> bool:
        """Whether the model is asked for the job's open rows; otherwise each gets its one line without it."""
        return self in (Status.QUEUED, Status.RUNNING)


_BEGINS_TO_END = frozenset({Status.CANCELLING, Status.EXPIRING, Status.FAILING})

NEXT: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RUNNING}) | _BEGINS_TO_END,
    Status.RUNNING: frozenset({Status.COMPLETED}) | _BEGINS_TO_END,
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.EXPIRING: frozenset({Status.EXPIRED}),
    Status.FAILING: frozenset({Status.FAILED}),
    Status.COMPLETED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.FAILED: frozenset(),
}
"""The transition table: what may follow on what. Whoever begins to end a job first decides how it ends."""

CLOSES_AS: dict[Status, Status] = {
    Status.RUNNING: Status.COMPLETED,
    Status.CANCELLING: Status.CANCELLED,
    Status.EXPIRING: Status.EXPIRED,
    Status.FAILING: Status.FAILED,
}
"""What a job without an open chunk becomes."""

SHOWN: dict[str, tuple[Status, ...]] = {
    shown: tuple(status for status in Status if status.shown == shown)
    for shown in dict.fromkeys(status.shown for status in Status)
}
"""A status as callers know it → the states it covers."""
