"""Six faults a store or a consumer of this kind may well have. Each is planted alone, and a chaos run has to find it."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.plan import KILLS, STOPS, Fault, Hit

# A slow machine in the one moment that matters: it makes the fault's window as wide as a busy day would.
SLOW_S = 0.3


def _nothing() -> None:
    """Patch nothing."""


@dataclass(frozen=True, slots=True)
class Planted:
    """``patch`` runs in each door's process, ``sql`` in the database; ``faults`` are those that can bring it out."""

    faults: Sequence[Fault]
    patch: Callable[[], None] = field(default=_nothing)
    sql: str = ""


def plant(name: str) -> None:
    """Plant a fault into this process."""
    PLANTED[name].patch()


def _commit_before_result() -> None:
    """Offsets are committed first, results are written afterwards."""
    from aiokafka.structs import OffsetAndMetadata

    from batch_consumer.transactions import PartitionProducer

    commit = PartitionProducer._commit

    async def early(self: Any, records: Sequence[Any], offset: int, metadata: str) -> None:
        producer = self._producer
        await producer.begin_transaction()
        offsets = {self._source: OffsetAndMetadata(offset, metadata)}
        await producer.send_offsets_to_transaction(offsets, self._settings.group_id)
        await producer.commit_transaction()
        await asyncio.sleep(SLOW_S)
        await commit(self, records, offset, metadata)

    PartitionProducer._commit = early  # type: ignore[method-assign]


def _no_seek() -> None:
    """A partition that begins again goes on where its consumer happens to stand."""
    from batch_consumer.owned import OwnedPartition

    open_window = OwnedPartition._open

    class Unmoved:
        """A consumer that cannot be moved."""

        def __init__(self, consumer: Any) -> None:
            self._consumer = consumer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._consumer, name)

        def seek(self, partition: Any, offset: int) -> None:
            """Do nothing."""

    async def stay(self: Any) -> Any:
        # The first time it has to be told where to begin.
        if getattr(self, "_was_open", False) and not isinstance(self._consumer, Unmoved):
            self._consumer = Unmoved(self._consumer)
        window = await open_window(self)
        self._was_open = True
        return window

    OwnedPartition._open = stay  # type: ignore[method-assign]


def _no_fencing() -> None:
    """Each producer has a transactional id of its own, so nobody is fenced."""
    from aiokafka import AIOKafkaProducer

    start = AIOKafkaProducer.__init__

    def anonymous(self: Any, *args: Any, **options: Any) -> None:
        if options.get("transactional_id"):
            options["transactional_id"] += f".{uuid.uuid4().hex}"
        start(self, *args, **options)

    AIOKafkaProducer.__init__ = anonymous


def _counters_for_counts() -> None:
    """Rows are counted when their chunk is taken up, and not when it is done."""
    from batch_consumer.chunk_work import ChunkWork

    answer = ChunkWork._answer

    async def counted(self: Any) -> None:
        claim = self.chunk.claim
        count = "SELECT public.planted_count(%s, %s)"
        await self._parts.ledger._db.fetch(count, (claim.chunk.job, claim.plan.row_count))
        await answer(self)

    ChunkWork._answer = counted  # type: ignore[method-assign]


# Neither a completion nor a renewal asks whose claim it is.
_NO_GENERATION_CHECK = """
CREATE OR REPLACE FUNCTION twodoor.renew_leases(
    p_consumer text, p_epoch bigint, p_rows_in_flight integer, p_lease_s double precision,
    p_jobs text[], p_numbers integer[], p_generations integer[]
) RETURNS TABLE (job_id text, number integer, held boolean, status text, epoch bigint, paused boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO twodoor.consumers AS k (id, epoch, rows_in_flight, started_at, seen_at)
    VALUES (p_consumer, p_epoch, p_rows_in_flight, clock_timestamp(), clock_timestamp())
    ON CONFLICT (id) DO UPDATE
    SET epoch = excluded.epoch, rows_in_flight = excluded.rows_in_flight, seen_at = excluded.seen_at;
    UPDATE twodoor.chunks c SET lease_until = clock_timestamp() + make_interval(secs => p_lease_s)
    FROM unnest(p_jobs, p_numbers) AS n (job_id, number)
    WHERE c.job_id = n.job_id AND c.number = n.number AND NOT c.done;
    RETURN QUERY
    SELECT n.job_id, n.number, true, j.status, k.epoch, k.paused
    FROM twodoor.control k
    CROSS JOIN (SELECT * FROM unnest(p_jobs, p_numbers) UNION ALL VALUES (NULL::text, NULL::integer)) AS n (job_id, number)
    LEFT JOIN twodoor.jobs j ON j.id = n.job_id;
END $$;
CREATE OR REPLACE FUNCTION twodoor.complete_chunk(
    p_job text, p_number integer, p_generation integer, p_token text,
    p_part_key text, p_succeeded integer, p_failed integer, p_result_bytes bigint, p_error_bytes bigint
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE twodoor.chunks c
    SET done = true, lease_until = NULL, suspects = NULL, part_key = p_part_key, succeeded = p_succeeded,
        failed = p_failed, result_bytes = p_result_bytes, error_bytes = p_error_bytes
    WHERE c.job_id = p_job AND c.number = p_number;
    RETURN FOUND;
END $$;
"""
_COUNTERS_FOR_COUNTS = """
CREATE TABLE public.planted_counts (job_id text PRIMARY KEY, rows bigint NOT NULL);
CREATE FUNCTION public.planted_count(p_job text, p_rows bigint) RETURNS void LANGUAGE sql AS $$
    INSERT INTO public.planted_counts VALUES (p_job, p_rows)
    ON CONFLICT (job_id) DO UPDATE SET rows = public.planted_counts.rows + excluded.rows
$$;
CREATE FUNCTION public.planted_close() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.rows_succeeded := COALESCE((SELECT rows FROM public.planted_counts WHERE job_id = NEW.id), 0) - NEW.rows_failed;
    RETURN NEW;
END $$;
CREATE TRIGGER planted_close BEFORE UPDATE ON twodoor.jobs FOR EACH ROW
    WHEN (NEW.finished_at IS NOT NULL AND OLD.finished_at IS NULL) EXECUTE FUNCTION public.planted_close();
"""
# What was seen to have expired is deleted a while later, without asking again.
_SWEEP_WITHOUT_CAS = """
CREATE OR REPLACE FUNCTION twodoor.take_expired_uploads(p_limit integer) RETURNS SETOF text LANGUAGE sql AS $$
    INSERT INTO twodoor.garbage (prefix, leased_by, lease_until)
    SELECT 'jobs/' || u.job_id || '/', 'planted', clock_timestamp() + interval '10 seconds'
    FROM twodoor.uploads u WHERE u.expires_at <= clock_timestamp() LIMIT p_limit
    ON CONFLICT (prefix) DO NOTHING RETURNING substr(prefix, 6, length(prefix) - 6)
$$;
"""
_ZOMBIES = STOPS[:2]

PLANTED = {
    "commit before result": Planted(
        (Fault("kill", "consumer", Hit.RECORD), Fault("kill", "consumer-2", Hit.RECORD)), _commit_before_result
    ),
    "no generation check": Planted(_ZOMBIES, sql=_NO_GENERATION_CHECK),
    "no seek": Planted((STOPS[4], KILLS[5]), _no_seek),
    "counters for counts": Planted((KILLS[0], *_ZOMBIES), _counters_for_counts, _COUNTERS_FOR_COUNTS),
    "sweep without compare-and-set": Planted((STOPS[2],), sql=_SWEEP_WITHOUT_CAS),
    "no fencing": Planted(_ZOMBIES, _no_fencing),
}
"""Name → the planted fault; a run with it must break an invariant within ten rounds."""
