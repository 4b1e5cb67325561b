"""What the client gives of jobs: the job, a row's result, the state of bulk work. Plain frozen values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from twodoor.errors import RowFailed
from twodoor.wire import Prediction, row_of

ENDED = frozenset({"completed", "failed", "cancelled", "expired"})


@dataclass(frozen=True, slots=True)
class JobRows:
    """Counts of a job's rows; ``succeeded + failed + pending`` is ``total``."""

    total: int
    succeeded: int
    failed: int
    pending: int


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed as a whole."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the server told of it. Times are UTC; ``expires_at`` is when its results are removed.

    ``status``: ``queued``, ``running``, ``cancelling``, or one of the ends ``completed``, ``failed``, ``cancelled``,
    ``expired``. ``progress`` runs from 0 to 1. ``replayed``: an earlier submission with the same key made the job.
    """

    id: str
    status: str
    model: str
    model_version: str | None
    rows: JobRows
    progress: float
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    deadline_at: datetime | None = None
    expires_at: datetime | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    error: JobError | None = None
    replayed: bool = False
    request_id: str | None = field(default=None, compare=False)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The job as it came, for what this version of the client does not know."""

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in ENDED

    @classmethod
    def of(cls, body: Mapping[str, Any], *, replayed: bool = False, request_id: str | None = None) -> Self:
        """Read a job; raises ValueError, KeyError, TypeError or AttributeError where it is none."""
        rows, error = body["rows"], body.get("error")
        return cls(
            id=str(body["id"]),
            status=str(body["status"]),
            model=str(body["model"]),
            model_version=body.get("model_version"),
            rows=JobRows(*(int(rows[name]) for name in ("total", "succeeded", "failed", "pending"))),
            progress=float(body["progress"]),
            created_at=datetime.fromisoformat(body["created_at"]),
            started_at=_time(body.get("started_at")),
            finished_at=_time(body.get("finished_at")),
            deadline_at=_time(body.get("deadline_at")),
            expires_at=_time(body.get("expires_at")),
            metadata=dict(body.get("metadata") or {}),
            error=JobError(str(error["code"]), str(error["message"])) if error else None,
            replayed=replayed,
            request_id=request_id,
            raw=body,
        )


@dataclass(frozen=True, slots=True)
class ResultRow:
    """One row's result: ``index`` counts the job's rows from 0, ``id`` is the caller's own.

    ``answer`` is the prediction, or the RowFailed of a row without one; ``line`` is that row's physical line in the
    JSONL that was sent, counted from 1.
    """

    index: int
    id: str | None
    answer: Prediction | RowFailed
    line: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read one line's value; raises ValueError, KeyError, TypeError or AttributeError where it is no result."""
        failed = row.get("error")
        line = failed.get("line") if failed else None
        return cls(int(row["index"]), row.get("id"), row_of(row if failed else row["output"]), line, row)


@dataclass(frozen=True, slots=True)
class BulkState:
    """Whether bulk work goes on: ``running``, ``pausing`` (some consumer has not stopped yet) or ``paused``."""

    state: str
    consumers: Sequence[Mapping[str, Any]]


def _time(value: str | None) -> datetime | None:
    return datetime.fromisoformat(value) if value else None
