"""Rules that every store of the ledger keeps: what a job must be, what may follow, which object keys are ours. Pure."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jobs.ledger import input_key
from jobs.records import BulkState, ChunkId, ChunkPlan, Claim, ConsumerState, Control, Done, Job, NewJob
from jobs.states import NEXT, Status
from serving.errors import DependencyDown, IdempotencyMismatch, InvalidJob, QuotaExceeded

_QUOTA_RETRY_S = 5.0
_PART = re.compile(r"jobs/([^/]+)/parts/(\d{8})/([^/]+)")
_INPUT = re.compile(r"jobs/([^/]+)/input")
_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")


def before(status: Status) -> Sequence[str]:
    """Return the states from which a job may become ``status``."""
    return [state.value for state in Status if status in NEXT[state]]


def storable(text: str) -> bool:
    """Return whether a text can be in the ledger at all: no NUL and no lone surrogate."""
    return not _NOT_TEXT.search(text)


def check(job: NewJob, chunks: Sequence[ChunkPlan]) -> None:
    """Raise InvalidJob for text no store can keep, ValueError for chunks that are not those of the job."""
    texts = {
        "model": job.model,
        "idempotency_key": job.idempotency_key,
        "request_id": job.request_id,
        "tenant": job.tenant,
    }
    for field, text in texts.items():
        if text is not None and not storable(text):
            raise InvalidJob(f"{field} holds a character that cannot be kept (NUL or a lone surrogate)", field)
    if not all(storable(text) for text in _texts(job.metadata)):
        raise InvalidJob("metadata holds a character that cannot be kept (NUL or a lone surrogate)", "metadata")
    if not chunks or sum(chunk.row_count for chunk in chunks) != job.row_count:
        raise ValueError(f"{len(chunks)} chunks do not hold the job's {job.row_count} rows")


def as_json(field: str, value: Mapping[str, Any]) -> str:
    """Return a mapping as JSON text; raises InvalidJob for what JSON does not have."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidJob(f"{field} is not JSON", field) from exc


def _texts(value: Any) -> Iterator[str]:
    open_values = [value]
    while open_values:
        item = open_values.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            open_values += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            open_values += item


def check_done(claim: Claim, done: Done) -> None:
    """Raise ValueError where the counts are not those of the chunk: a bug of the consumer."""
    if min(done.succeeded, done.failed) < 0 or done.succeeded + done.failed != claim.plan.row_count:
        raise ValueError(f"{done.succeeded} + {done.failed} rows of a chunk of {claim.plan.row_count}")


def at_acceptance(job: Job) -> Job:
    """Return the job as it was when it was accepted."""
    return replace(
        job, status=Status.QUEUED, model_version=None, rows_succeeded=0, rows_failed=0, started_at=None,
        finished_at=None, expires_at=None, error_code=None, error_message=None,
    )  # fmt: skip


def bulk_state(control: Control, consumers: Sequence[ConsumerState]) -> BulkState:
    """Return the state over the live consumers: paused only when each has obeyed and has nothing in flight."""
    if not control.paused:
        return BulkState("running", control, consumers)
    obeyed = all(found.epoch == control.epoch and found.rows_in_flight == 0 for found in consumers)
    return BulkState("paused" if obeyed else "pausing", control, consumers)


def utc(moment: datetime) -> datetime:
    """Return the same moment in UTC."""
    return moment.astimezone(UTC)


def over_quota(job: NewJob) -> QuotaExceeded:
    """Return the error of a tenant that has too many rows waiting."""
    return QuotaExceeded(
        f"with this job more than {job.max_queued_rows} rows would wait", _QUOTA_RETRY_S, job.max_queued_rows
    )


def mismatch() -> IdempotencyMismatch:
    """Return the error of a key that stands for something else."""
    return IdempotencyMismatch(
        "this Idempotency-Key was used before for another request, or for a job that was deleted"
    )


def swept() -> DependencyDown:
    """Return the error of an upload that was given up by the sweeper before its job came."""
    return DependencyDown("the upload took too long and was given up: send it again")


class OwnKey(NamedTuple):
    """An object key of ours, taken apart: a job's input, or the part of one claim of a chunk."""

    key: str
    job: str
    chunk: ChunkId | None
    token: str | None


def own_key(key: str) -> OwnKey | None:
    """Take a key apart; None for one that is not of our making."""
    if (part := _PART.fullmatch(key)) is not None and storable(key):
        return OwnKey(key, part[1], ChunkId(part[1], int(part[2])), part[3])
    if (found := _INPUT.fullmatch(key)) is not None and storable(key):
        return OwnKey(input_key(found[1]), found[1], None, None)
    return None
