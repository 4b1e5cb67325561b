"""Whose fault was it: retry, split, wait or condemn. Pure: the lane runs the model and the canary, this decides.

A row is condemned only
- when Triton says that the input itself is wrong (INVALID_ARGUMENT) and the row was alone in its request, or
- when it fails alone in flight while the canary passes before and after, or
- when the model's process has died ``row_deaths`` times with this row alone in flight, each time with a canary that
  passed just before and passes again after the restart.
Everything else is the server's trouble, and waits.
"""

from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

from serving.errors import (
    DeadlineExceeded,
    DependencyDown,
    ModelFailed,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    RowCrashed,
    RowError,
    TwodoorError,
    UnknownModel,
)

T = TypeVar("T")

# One late answer may be a busy machine's; a row that is late twice, alone, between canaries that are not, is the reason.
LATE_LIMIT = 2


class Fault(Enum):
    """What a failed request looks like."""

    REFUSED = "refused"
    """INVALID_ARGUMENT: one of its rows is wrong."""
    FAILED = "failed"
    """The model raised an error."""
    LATE = "late"
    """No answer before the deadline."""
    BUSY = "overloaded"
    """Triton's queue is full."""
    ABSENT = "model_not_ready"
    """The model is not loaded (any more)."""
    LOST = "model_died"
    """The model's process or the whole server went away while the request was in flight."""


class Step(Enum):
    """What the lane does with the rows of a failed request."""

    SPLIT = "split"
    CONDEMN = "condemn"
    RUN_ALONE = "run_alone"
    SLOW_DOWN = "slow_down"
    WAIT = "wait"
    WAIT_AND_SUSPECT = "wait_and_suspect"
    COUNT_DEATH = "count_death"


def fault_of(error: TwodoorError) -> Fault:
    """Return what kind of failure an error of the pipeline is."""
    if isinstance(error, ModelRefused):
        return Fault.REFUSED
    if isinstance(error, DeadlineExceeded):
        return Fault.LATE
    if isinstance(error, Overloaded):
        return Fault.BUSY
    # The registry knows the model, so an unknown one is one that was unloaded.
    if isinstance(error, ModelNotReady | UnknownModel):
        return Fault.ABSENT
    if isinstance(error, DependencyDown):
        return Fault.LOST
    return Fault.FAILED


def after_request(fault: Fault, rows: int) -> Step:
    """Decide after a request that ran beside others."""
    if fault is Fault.BUSY:
        return Step.SLOW_DOWN
    if fault is Fault.ABSENT:
        return Step.WAIT
    if fault is Fault.LOST:
        return Step.WAIT_AND_SUSPECT
    if rows > 1:
        return Step.SPLIT
    return Step.CONDEMN if fault is Fault.REFUSED else Step.RUN_ALONE


def after_lone_request(fault: Fault, canary_before: bool, canary_after: bool, late: int) -> Step:
    """Decide after a request of one row with nothing else in flight; ``late`` counts its late answers so far, this one too.

    ``canary_after`` of a LOST request is the canary after the restart, that of a LATE one the canary after the request
    has left the instance.
    """
    if fault is Fault.BUSY:
        return Step.SLOW_DOWN
    if fault is Fault.ABSENT:
        return Step.WAIT
    if fault is Fault.REFUSED:
        return Step.CONDEMN
    if not (canary_before and canary_after):
        return Step.WAIT
    if fault is Fault.LOST:
        return Step.COUNT_DEATH
    if fault is Fault.LATE and late < LATE_LIMIT:
        return Step.RUN_ALONE
    return Step.CONDEMN


def sentence(fault: Fault, error: TwodoorError) -> RowError:
    """Return the error a condemned row gets."""
    if isinstance(error, RowError):
        return error
    if fault is Fault.LATE:
        return ModelFailed("the model gave no answer for this text in time while it answered others")
    return ModelFailed("the model failed on this text while it answered others")


def crashed(deaths: int) -> RowCrashed:
    """Return the error of a row under which the model's process died too often."""
    return RowCrashed(f"the model's process died {deaths} times with this text alone in flight")


def halves(rows: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split the rows of a failed request in two."""
    middle = len(rows) // 2
    return list(rows[:middle]), list(rows[middle:])
