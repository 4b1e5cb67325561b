"""One structured log line for each transition of a job, with the request that caused the job."""

import structlog

from jobs.records import Job
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
        rows=job.rows_total,
        succeeded=job.rows_succeeded,
        failed=job.rows_failed,
    )
