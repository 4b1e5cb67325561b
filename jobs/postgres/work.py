"""Claims, leases, completion, and the operator's hand on consumers, each method one statement."""

import json
from collections.abc import Mapping, Sequence

from jobs import rules
from jobs.postgres.connections import Connections
from jobs.postgres.rows import claim_of, control_of, job_of, sql, suspects_text
from jobs.records import BulkState, ChunkId, Claim, ConsumerState, Control, Done, Job, Renewal, Suspect
from jobs.states import Status


class PostgresWork:
    """The parts ``Work`` and ``Bulk`` of the ledger."""

    def __init__(self, connections: Connections) -> None:
        self._db = connections

    async def claim(
        self, consumer: str, models: Mapping[str, Sequence[str]], full_jobs: Sequence[str], lease_s: float
    ) -> Claim | None:
        runnable = json.dumps({model: list(versions) for model, versions in models.items()})
        rows = await self._db.fetch(
            sql("SELECT $CLAIM FROM twodoor.claim_chunk(%s, %s::jsonb, %s::text[], %s) k"),
            (consumer, runnable, list(full_jobs), lease_s),
        )
        return claim_of(rows[0]) if rows else None

    async def renew(
        self, consumer: str, claims: Mapping[ChunkId, int], epoch: int, rows_in_flight: int, lease_s: float
    ) -> Renewal:
        # In one order, so that two renewals never wait for each other crosswise.
        named = sorted(claims.items())
        rows = await self._db.fetch(
            "SELECT * FROM twodoor.renew_leases(%s, %s, %s, %s, %s::text[], %s::integer[], %s::integer[])",
            (
                consumer, epoch, rows_in_flight, lease_s,
                [chunk.job for chunk, _ in named], [chunk.number for chunk, _ in named], [held for _, held in named],
            ),
        )  # fmt: skip
        lost: set[ChunkId] = set()
        ending: dict[ChunkId, Status] = {}
        for row in rows:
            if row["job_id"] is None:
                continue
            chunk = ChunkId(row["job_id"], row["number"])
            if not row["held"]:
                lost.add(chunk)
            elif not (status := Status(row["status"])).runs:
                ending[chunk] = status
        return Renewal(frozenset(lost), ending, control_of(rows[0]))

    async def complete(self, claim: Claim, done: Done) -> bool:
        rules.check_done(claim, done)
        rows = await self._db.fetch(
            "SELECT twodoor.complete_chunk(%s, %s, %s, %s, %s, %s, %s, %s, %s) AS done",
            (
                *claim.chunk, claim.generation, claim.token, done.part_key,
                done.succeeded, done.failed, done.result_bytes, done.error_bytes,
            ),
        )  # fmt: skip
        return bool(rows[0]["done"])

    async def release(self, claims: Sequence[Claim]) -> None:
        named = sorted(claims, key=lambda claim: claim.chunk)
        await self._db.fetch(
            _RELEASE,
            (
                [claim.chunk.job for claim in named], [claim.chunk.number for claim in named],
                [claim.generation for claim in named], [claim.token for claim in named],
            ),
        )  # fmt: skip

    async def remember(self, claim: Claim, suspects: Mapping[int, Suspect]) -> bool:
        statement = """
            UPDATE twodoor.chunks c SET suspects = %s::json
            WHERE c.job_id = %s AND c.number = %s AND c.generation = %s AND c.token::text = %s AND NOT c.done
            RETURNING c.number
        """
        values = (suspects_text(suspects), *claim.chunk, claim.generation, claim.token)
        return bool(await self._db.fetch(statement, values))

    async def leave(self, consumer: str) -> None:
        await self._db.fetch("DELETE FROM twodoor.consumers WHERE id = %s", (consumer,))

    async def fail(self, job_id: str, code: str, message: str) -> Job | None:
        rows = await self._db.fetch(_FAIL, (job_id, rules.before(Status.FAILING), code, message))
        return job_of(rows[0]) if rows and rows[0]["moved"] else None

    async def set_paused(self, paused: bool) -> Control:
        return control_of((await self._db.fetch(_SET_PAUSED, (paused,)))[0])

    async def bulk_state(self, consumer_ttl_s: float) -> BulkState:
        rows = await self._db.fetch(_BULK_STATE, (consumer_ttl_s,))
        consumers = [
            ConsumerState(
                row["id"], row["obeyed"], row["rows_in_flight"], rules.utc(row["started_at"]), rules.utc(row["seen_at"])
            )
            for row in rows
            if row["id"] is not None
        ]
        return rules.bulk_state(control_of(rows[0]), consumers)


_RELEASE = """
    UPDATE twodoor.chunks c SET token = NULL, consumer = NULL, lease_until = NULL
    FROM unnest(%s::text[], %s::integer[], %s::integer[], %s::text[]) AS n (job_id, number, generation, token)
    WHERE c.job_id = n.job_id AND c.number = n.number AND c.generation = n.generation AND c.token::text = n.token
        AND NOT c.done
"""
_FAIL = sql("""
    SELECT m.moved, $JOB FROM twodoor.move_job(NULL, %s, %s, 'failing', %s, %s) m
    CROSS JOIN LATERAL (SELECT (m.job).*) j $COUNTED
""")
_SET_PAUSED = """
    UPDATE twodoor.control k SET epoch = k.epoch + (k.paused <> wish.paused)::integer, paused = wish.paused
    FROM (SELECT %s::boolean) AS wish (paused)
    RETURNING k.epoch, k.paused
"""
_BULK_STATE = """
    SELECT k.epoch, k.paused, c.id, c.epoch AS obeyed, c.rows_in_flight, c.started_at, c.seen_at
    FROM twodoor.control k
    LEFT JOIN twodoor.consumers c ON c.seen_at > clock_timestamp() - make_interval(secs => %s)
    ORDER BY c.id
"""
