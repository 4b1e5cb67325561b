"""A job as callers see it: the one JSON form of the HTTP interface, the events topic and the command line."""

from datetime import UTC, datetime
from typing import Any

from jobs.records import Job


def job_json(job: Job) -> dict[str, Any]:
    """Return the job as `GET /v1/jobs/{id}` shows it; plain JSON values, times in RFC 3339 (UTC, microseconds)."""
    shown: dict[str, Any] = {
        "id": job.id,
        "status": job.status.shown,
        "model": job.model,
        "model_version": job.model_version,
        "rows": {
            "total": job.rows_total,
            "succeeded": job.rows_succeeded,
            "failed": job.rows_failed,
            "pending": job.rows_total - job.rows_succeeded - job.rows_failed,
        },
        "progress": (job.rows_succeeded + job.rows_failed) / job.rows_total if job.rows_total else 0.0,
        "created_at": time_text(job.created_at),
        "started_at": time_text(job.started_at),
        "finished_at": time_text(job.finished_at),
        "deadline_at": time_text(job.deadline_at),
        "expires_at": time_text(job.expires_at),
        "metadata": dict(job.metadata),
    }
    if job.error_code is not None:
        shown["error"] = {"code": job.error_code, "message": job.error_message or ""}
    return shown


def time_text(moment: datetime | None) -> str | None:
    """Return RFC 3339 in UTC with microseconds and ``Z``; None for a moment that has not come."""
    return (
        None
        if moment is None
        else moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
    )
