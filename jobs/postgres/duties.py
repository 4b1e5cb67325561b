"""The housekeeper's duties, each method one statement."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from jobs import rules
from jobs.postgres.connections import Connections
from jobs.postgres.rows import job_of, sql
from jobs.records import Job, Notification
from jobs.states import CLOSES_AS, Status


class PostgresDuties:
    """The part ``Duties`` of the ledger."""

    def __init__(self, connections: Connections) -> None:
        self._db = connections

    async def close_due(self, limit: int) -> Sequence[Job]:
        closes_as = json.dumps({before.value: after.value for before, after in CLOSES_AS.items()})
        rows = await self._db.fetch(
            sql("SELECT $JOB FROM twodoor.close_jobs(%s, %s::jsonb) j $COUNTED"), (limit, closes_as)
        )
        return [job_of(row) for row in rows]

    async def expire_due(self, limit: int) -> Sequence[Job]:
        rows = await self._db.fetch(_EXPIRE, (rules.before(Status.EXPIRING), limit))
        return [job_of(row) for row in rows]

    async def retire_due(self, limit: int) -> Sequence[Job]:
        rows = await self._db.fetch(sql("SELECT $JOB FROM twodoor.retire_jobs(%s) j $COUNTED"), (limit,))
        return [job_of(row) for row in rows]

    async def forget_due(self, limit: int, idempotency_ttl_s: float) -> int:
        rows = await self._db.fetch("SELECT twodoor.forget(%s, %s) AS purged", (limit, idempotency_ttl_s))
        return int(rows[0]["purged"])

    async def take_notifications(self, consumer: str, limit: int, lease_s: float) -> Sequence[Notification]:
        rows = await self._db.fetch(_TAKE_NOTIFICATIONS, {"by": consumer, "limit": limit, "lease_s": lease_s})
        return [
            Notification(
                row["notification"], row["kind"], rules.at_acceptance(job) if row["kind"] == "accepted" else job
            )
            for row, job in ((row, job_of(row)) for row in rows)
        ]

    async def drop_notifications(self, ids: Sequence[int]) -> None:
        await self._db.fetch("DELETE FROM twodoor.notifications WHERE id = ANY (%s::bigint[])", (list(ids),))

    async def take_garbage(self, consumer: str, limit: int, lease_s: float) -> Sequence[str]:
        rows = await self._db.fetch(_TAKE_GARBAGE, {"by": consumer, "limit": limit, "lease_s": lease_s})
        return sorted(row["prefix"] for row in rows)

    async def drop_garbage(self, prefixes: Sequence[str]) -> None:
        await self._db.fetch("DELETE FROM twodoor.garbage WHERE prefix = ANY (%s::text[])", (list(prefixes),))

    async def take_duty(self, name: str, consumer: str, interval_s: float, lease_s: float) -> bool:
        values = {"name": name, "by": consumer, "interval_s": interval_s, "lease_s": lease_s}
        return bool(await self._db.fetch(_TAKE_DUTY, values))

    async def end_duty(self, name: str, consumer: str) -> None:
        await self._db.fetch(
            "UPDATE twodoor.periodic SET ended_at = clock_timestamp(), leased_by = NULL, lease_until = NULL"
            " WHERE name = %s AND leased_by = %s",
            (name, consumer),
        )

    async def referenced(self, keys: Sequence[str]) -> frozenset[str]:
        parsed = {key: rules.own_key(key) for key in keys}
        own = [found for found in parsed.values() if found is not None]
        rows = await self._db.fetch(
            _REFERENCED,
            (
                [found.key for found in own], [found.job for found in own],
                [found.chunk.number if found.chunk else None for found in own], [found.token for found in own],
            ),
        )  # fmt: skip
        return frozenset(row["key"] for row in rows) | {key for key, found in parsed.items() if found is None}

    async def duties(self) -> Mapping[str, int]:
        return {row["duty"]: row["waiting"] for row in await self._db.fetch("SELECT duty, waiting FROM twodoor.duties")}

    async def wanted(self) -> Mapping[str, frozenset[str | None]]:
        rows = await self._db.fetch(
            "SELECT DISTINCT j.model, j.model_version FROM twodoor.jobs j WHERE j.status IN ('queued', 'running')"
        )
        versions: dict[str, set[str | None]] = defaultdict(set)
        for row in rows:
            versions[row["model"]].add(row["model_version"])
        return {model: frozenset(found) for model, found in versions.items()}

    async def jobs_wanting(self, model: str, version: str | None, limit: int) -> Sequence[str]:
        rows = await self._db.fetch(
            "SELECT j.id FROM twodoor.jobs j WHERE j.status IN ('queued', 'running') AND j.model = %s"
            " AND j.model_version IS NOT DISTINCT FROM %s ORDER BY j.created_at, j.id LIMIT %s",
            (model, version, limit),
        )
        return [row["id"] for row in rows]


_EXPIRE = sql("""
    WITH moved AS (
        UPDATE twodoor.jobs u SET status = 'expiring'
        WHERE u.status = ANY (%s) AND u.id = ANY (ARRAY(SELECT o.job_id FROM twodoor.overdue o LIMIT %s))
        RETURNING u.*
    )
    SELECT $JOB FROM moved j $COUNTED
""")
# ARRAY(…) and not IN: the rows are chosen and locked once, whatever the plan.
# A job's end is not told before its acceptance: only who has locked a job's first notification takes the later ones. That
# the first one has a lease is not enough to see: another may be taking it in this very moment.
_TAKE_NOTIFICATIONS = sql("""
    WITH firsts AS MATERIALIZED (
        SELECT n.id, n.job_id FROM twodoor.notifications n
        WHERE (n.lease_until IS NULL OR n.lease_until <= clock_timestamp())
            AND NOT EXISTS (SELECT FROM twodoor.notifications o WHERE o.job_id = n.job_id AND o.id < n.id)
        ORDER BY n.id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
    ), taken AS (
        UPDATE twodoor.notifications t
        SET leased_by = %(by)s, lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)
        WHERE t.id = ANY (ARRAY(
            SELECT n.id FROM firsts f JOIN twodoor.notifications n ON n.job_id = f.job_id
            WHERE n.lease_until IS NULL OR n.lease_until <= clock_timestamp()
            ORDER BY n.id LIMIT %(limit)s))
        RETURNING t.*
    )
    SELECT t.id AS notification, t.kind, $JOB
    FROM taken t JOIN twodoor.jobs j ON j.id = t.job_id $COUNTED ORDER BY t.id
""")
_TAKE_GARBAGE = """
    UPDATE twodoor.garbage t SET leased_by = %(by)s, lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)
    WHERE t.prefix = ANY (ARRAY(
        SELECT g.prefix FROM twodoor.garbage g WHERE g.lease_until IS NULL OR g.lease_until <= clock_timestamp()
        ORDER BY g.created_at, g.prefix LIMIT %(limit)s FOR UPDATE SKIP LOCKED))
    RETURNING t.prefix
"""
_TAKE_DUTY = """
    INSERT INTO twodoor.periodic AS p (name, leased_by, lease_until)
    VALUES (%(name)s, %(by)s, clock_timestamp() + make_interval(secs => %(lease_s)s))
    ON CONFLICT (name) DO UPDATE SET leased_by = excluded.leased_by, lease_until = excluded.lease_until
    WHERE (p.lease_until IS NULL OR p.lease_until <= clock_timestamp())
        AND (p.ended_at IS NULL OR p.ended_at + make_interval(secs => %(interval_s)s) <= clock_timestamp())
    RETURNING p.name
"""
_REFERENCED = """
    SELECT n.key FROM unnest(%s::text[], %s::text[], %s::integer[], %s::text[]) AS n (key, job, number, token)
    WHERE EXISTS (SELECT FROM twodoor.uploads u WHERE u.job_id = n.job AND u.key = n.key)
        OR EXISTS (SELECT FROM twodoor.jobs j WHERE j.id = n.job AND j.input_key = n.key AND j.deleted_at IS NULL)
        OR EXISTS (SELECT FROM twodoor.chunks c WHERE c.job_id = n.job AND c.number = n.number
                   AND CASE WHEN c.done THEN c.part_key = n.key ELSE c.token::text = n.token END)
"""
