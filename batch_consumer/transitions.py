"""One structured log line for each transition of a job, with the request that caused the job."""

import structlog

from jobs.records import Claim, Job
from jobs.states import Status

log = structlog.get_logger(__name__)


def log_transition(job: Job, before: Status | None) -> None:
    """Say that a job went from ``before`` to the state it is in now."""
    log.info(
        "job",
        job=job.id,
        from_status=before.value if before is not None else None,
        to_status=job.status.value,
        request_id=job.request_id,
        tenant=job.tenant,
        model=job.model,
        model_version=job.model_version,
        rows=job.rows_total,
        succeeded=job.rows_succeeded,
        failed=job.rows_failed,
        reason=job.error_code,
    )


def log_beginning(claim: Claim) -> None:
    """Say that a job runs, where this claim made it run."""
    if claim.begins_job:
        log.info(
            "job",
            job=claim.chunk.job,
            from_status=Status.QUEUED.value,
            to_status=claim.status.value,
            request_id=claim.request_id,
            tenant=claim.tenant,
            model=claim.model,
            model_version=claim.model_version,
        )


def open_status(job: Job) -> Status:
    """Return the state a job was in before it began to end."""
    return Status.QUEUED if job.started_at is None else Status.RUNNING
