"""Uploads, acceptance and what callers ask of their jobs, each method one statement."""

from collections.abc import Sequence

from jobs import rules
from jobs.postgres.connections import Connections
from jobs.postgres.rows import job_of, part_of, sql
from jobs.records import Accepted, ChunkPlan, Job, NewJob, Page, Part
from jobs.states import Status
from serving.errors import JobNotEnded, UnknownJob

# A job of 50,000,000 rows is about 100,000 chunks; these are inserted at more than 20,000 a second.
_CHUNKS_PER_EXTRA_S = 2_000


class PostgresIntake:
    """The parts ``Uploads`` and ``Intake`` of the ledger."""

    def __init__(self, connections: Connections) -> None:
        self._db = connections

    async def open_upload(self, job_id: str, tenant: str, key: str, ttl_s: float) -> None:
        await self._db.fetch(
            "INSERT INTO twodoor.uploads (job_id, tenant, key, expires_at)"
            " VALUES (%s, %s, %s, clock_timestamp() + make_interval(secs => %s))"
            " ON CONFLICT (job_id) DO UPDATE SET expires_at = excluded.expires_at",
            (job_id, tenant, key, ttl_s),
        )

    async def renew_upload(self, job_id: str, ttl_s: float) -> bool:
        statement = """
            UPDATE twodoor.uploads SET expires_at = clock_timestamp() + make_interval(secs => %s)
            WHERE job_id = %s RETURNING job_id
        """
        return bool(await self._db.fetch(statement, (ttl_s, job_id)))

    async def drop_upload(self, job_id: str) -> bool:
        return bool(await self._db.fetch("DELETE FROM twodoor.uploads WHERE job_id = %s RETURNING job_id", (job_id,)))

    async def take_expired_uploads(self, limit: int) -> Sequence[str]:
        rows = await self._db.fetch("SELECT job_id FROM twodoor.take_expired_uploads(%s) AS t (job_id)", (limit,))
        return [row["job_id"] for row in rows]

    async def queued_rows(self, tenant: str) -> int:
        rows = await self._db.fetch("SELECT twodoor.queued_rows(%s) AS waiting", (tenant,))
        return int(rows[0]["waiting"])

    async def accept(self, job: NewJob, chunks: Sequence[ChunkPlan]) -> Accepted:
        rules.check(job, chunks)
        values = (
            job.id, job.tenant, job.weight, job.model, job.truncate, rules.as_json("metadata", job.metadata),
            job.input_key, job.input_bytes, job.has_lines, job.row_count, job.completion_window_s, job.result_ttl_s,
            job.fingerprint, job.uploaded, job.idempotency_key, job.max_queued_rows, job.request_id,
            None if job.source is None else rules.as_json("source", job.source),
            [c.start_byte for c in chunks], [c.end_byte for c in chunks], [c.first_row for c in chunks],
            [c.first_line for c in chunks], [c.row_count for c in chunks], [c.oversized for c in chunks],
        )  # fmt: skip
        rows = await self._db.fetch(_ACCEPT, values, extra_s=len(chunks) / _CHUNKS_PER_EXTRA_S)
        match rows[0]["outcome"]:
            case "mismatch":
                raise rules.mismatch()
            case "quota":
                raise rules.over_quota(job)
            case "swept":
                raise rules.swept()
            case outcome:
                return Accepted(job_of(rows[0]), outcome == "replayed")

    async def find_replay(self, tenant: str, idempotency_key: str) -> tuple[Job | None, bytes] | None:
        if not rules.storable(idempotency_key):
            return None
        rows = await self._db.fetch(_FIND_REPLAY, (tenant, idempotency_key))
        return (job_of(rows[0]) if rows[0]["id"] else None, rows[0]["fingerprint"]) if rows else None

    async def get(self, tenant: str, job_id: str) -> Job:
        _require_id(job_id)
        rows = await self._db.fetch(
            sql("SELECT $JOB FROM twodoor.jobs j $COUNTED WHERE j.id = %s AND j.tenant = %s AND j.deleted_at IS NULL"),
            (job_id, tenant),
        )
        if not rows:
            raise _unknown()
        return job_of(rows[0])

    async def list_jobs(self, tenant: str, statuses: Sequence[Status] | None, after: str | None, limit: int) -> Page:
        created_at = None
        if after is not None:
            _require_id(after)
            # Deleted ones too: their id still works as a cursor.
            cursor = "SELECT created_at FROM twodoor.jobs WHERE id = %s AND tenant = %s"
            rows = await self._db.fetch(cursor, (after, tenant))
            if not rows:
                raise _unknown()
            created_at = rows[0]["created_at"]
        wanted = [status.value for status in (Status if statuses is None else statuses)]
        rows = await self._db.fetch(
            _LIST, {"tenant": tenant, "statuses": wanted, "at": created_at, "after": after, "limit": limit + 1}
        )
        return Page([job_of(row) for row in rows[:limit]], len(rows) > limit)

    async def parts(self, tenant: str, job_id: str) -> Sequence[Part]:
        _require_id(job_id)
        rows = await self._db.fetch(_PARTS, (job_id, tenant))
        if not rows:
            raise _unknown()
        return [part_of(row) for row in rows if row["part_key"] is not None]

    async def cancel(self, tenant: str, job_id: str) -> tuple[Job, bool]:
        _require_id(job_id)
        rows = await self._db.fetch(_CANCEL, (tenant, job_id, rules.before(Status.CANCELLING)))
        if not rows:
            raise _unknown()
        return job_of(rows[0]), rows[0]["moved"]

    async def delete(self, tenant: str, job_id: str) -> None:
        _require_id(job_id)
        rows = await self._db.fetch("SELECT twodoor.delete_job(%s, %s) AS outcome", (tenant, job_id))
        if rows[0]["outcome"] == "unknown":
            raise _unknown()
        if rows[0]["outcome"] == "open":
            raise JobNotEnded("the job has not ended: cancel it first, or wait for its end")


_ACCEPT = sql("""
    SELECT a.outcome, $JOB FROM twodoor.accept_job(
        %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,
        %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::integer[], %s::boolean[]
    ) a CROSS JOIN LATERAL (SELECT (a.job).*) j $COUNTED
""")
_FIND_REPLAY = sql("""
    SELECT k.fingerprint, $JOB FROM twodoor.idempotency k
    LEFT JOIN twodoor.jobs j ON j.id = k.job_id AND j.deleted_at IS NULL $COUNTED
    WHERE k.tenant = %s AND k.key = %s
""")
# One short walk through the index for each status, so that a rare one is found at once among many others.
_LIST = sql("""
    SELECT $JOB FROM (
        SELECT f.* FROM unnest(%(statuses)s::text[]) AS s (status) CROSS JOIN LATERAL (
            SELECT * FROM twodoor.jobs o
            WHERE o.tenant = %(tenant)s AND o.status = s.status AND o.deleted_at IS NULL
                AND (%(at)s::timestamptz IS NULL OR (o.created_at, o.id) < (%(at)s::timestamptz, %(after)s::text))
            ORDER BY o.created_at DESC, o.id DESC LIMIT %(limit)s
        ) f ORDER BY f.created_at DESC, f.id DESC LIMIT %(limit)s
    ) j $COUNTED ORDER BY j.created_at DESC, j.id DESC
""")
_PARTS = """
    SELECT c.part_key, c.first_row, c.row_count, c.result_bytes, c.error_bytes FROM twodoor.jobs j
    LEFT JOIN twodoor.chunks c ON c.job_id = j.id AND c.number < COALESCE(
        (SELECT min(o.number) FROM twodoor.chunks o WHERE o.job_id = j.id AND NOT o.done), j.chunk_count)
    WHERE j.id = %s AND j.tenant = %s AND j.deleted_at IS NULL ORDER BY c.number
"""
_CANCEL = sql("""
    SELECT m.moved, $JOB FROM twodoor.move_job(%s, %s, %s, 'cancelling', NULL, NULL) m
    CROSS JOIN LATERAL (SELECT (m.job).*) j $COUNTED
""")


def _require_id(job_id: str) -> None:
    if not rules.storable(job_id):
        raise _unknown()


def _unknown() -> UnknownJob:
    return UnknownJob("there is no such job")
