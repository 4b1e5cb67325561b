"""From the ledger's rows to its records, and the column lists that go with them."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jobs.postgres.connections import Row
from jobs.records import ChunkId, ChunkPlan, Claim, Control, Job, Part, Suspect
from jobs.rules import utc
from jobs.states import Status

_JOB = """
    j.id, j.tenant, j.status, j.model, j.model_version, j.truncate, j.metadata::text AS metadata, j.rows_total,
    COALESCE(j.rows_succeeded, counted.succeeded, 0)::bigint AS rows_succeeded,
    COALESCE(j.rows_failed, counted.failed, 0)::bigint AS rows_failed,
    j.created_at, j.started_at, j.finished_at, j.deadline_at, j.expires_at, j.error_code, j.error_message,
    j.request_id, j.source::text AS source
"""
_COUNTED = """
    LEFT JOIN LATERAL (
        SELECT sum(c.succeeded) AS succeeded, sum(c.failed) AS failed
        FROM twodoor.chunks c WHERE c.job_id = j.id AND c.done AND j.finished_at IS NULL
    ) counted ON true
"""
_CLAIM = """
    (k.chunk).job_id, (k.chunk).number, (k.chunk).generation, (k.chunk).token::text, (k.chunk).start_byte,
    (k.chunk).end_byte, (k.chunk).first_row, (k.chunk).row_count, (k.chunk).first_line, (k.chunk).oversized,
    (k.chunk).suspects::text, (k.job).tenant, (k.job).status, (k.job).model, (k.job).model_version, (k.job).truncate,
    (k.job).input_key, (k.job).has_lines, (k.job).error_code, (k.job).error_message, (k.job).request_id,
    k.weight
"""


def sql(text: str) -> str:
    """Fill in ``$JOB`` and ``$COUNTED`` (a job called ``j`` and the sums over its chunks), ``$CLAIM`` (a claim ``k``)."""
    return text.replace("$JOB", _JOB).replace("$COUNTED", _COUNTED).replace("$CLAIM", _CLAIM)


def job_of(row: Row) -> Job:
    """Return the job of a row with the columns $JOB."""
    return Job(
        id=row["id"], tenant=row["tenant"], status=Status(row["status"]), model=row["model"],
        model_version=row["model_version"], truncate=row["truncate"], metadata=json.loads(row["metadata"]),
        rows_total=row["rows_total"], rows_succeeded=row["rows_succeeded"], rows_failed=row["rows_failed"],
        created_at=utc(row["created_at"]), started_at=_utc_or_none(row["started_at"]),
        finished_at=_utc_or_none(row["finished_at"]), deadline_at=utc(row["deadline_at"]),
        expires_at=_utc_or_none(row["expires_at"]), error_code=row["error_code"], error_message=row["error_message"],
        request_id=row["request_id"], source=json.loads(row["source"]) if row["source"] else None,
    )  # fmt: skip


def claim_of(row: Row) -> Claim:
    """Return the claim of a row with the columns $CLAIM."""
    return Claim(
        chunk=ChunkId(row["job_id"], row["number"]), generation=row["generation"], token=row["token"],
        plan=ChunkPlan(
            row["start_byte"], row["end_byte"], row["first_row"], row["row_count"], row["first_line"], row["oversized"]
        ),
        tenant=row["tenant"], weight=row["weight"], status=Status(row["status"]), model=row["model"],
        model_version=row["model_version"], truncate=row["truncate"], input_key=row["input_key"],
        has_lines=row["has_lines"], suspects=suspects_of(row["suspects"]), error_code=row["error_code"],
        error_message=row["error_message"], request_id=row["request_id"],
    )  # fmt: skip


def part_of(row: Row) -> Part:
    """Return the part of a done chunk's row."""
    return Part(row["part_key"], row["first_row"], row["row_count"], row["result_bytes"], row["error_bytes"])


def control_of(row: Row) -> Control:
    """Return the operator's wish."""
    return Control(row["epoch"], row["paused"])


def suspects_text(suspects: Mapping[int, Suspect]) -> str | None:
    """Return what a chunk row keeps of its suspects; None for none."""
    return json.dumps({row: [found.attempts, found.deaths] for row, found in suspects.items()}) if suspects else None


def suspects_of(text: str | None) -> Mapping[int, Suspect]:
    """Read what ``suspects_text`` wrote."""
    kept: dict[str, Any] = json.loads(text) if text else {}
    return {int(row): Suspect(*numbers) for row, numbers in kept.items()}


def _utc_or_none(moment: datetime | None) -> datetime | None:
    return None if moment is None else utc(moment)
