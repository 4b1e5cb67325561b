"""Claims, leases, completion, and the operator's hand on consumers, in memory."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from uuid import uuid4

from jobs import rules
from jobs.memory.state import KeptChunk, KeptJob, Lease, State
from jobs.records import BulkState, ChunkId, Claim, ConsumerState, Control, Done, Job, Renewal, Suspect
from jobs.states import Status


class MemoryWork:
    """The parts ``Work`` and ``Bulk`` of the ledger."""

    _state: State

    async def claim(
        self, consumer: str, models: Mapping[str, Sequence[str]], full_jobs: Sequence[str], lease_s: float
    ) -> Claim | None:
        now = self._state.clock()
        for job in self._by_turn():
            if job.new.id in full_jobs or not _may_run(job, models):
                continue
            for number, chunk in job.open_chunks():
                if chunk.lease.free(now):
                    return self._take(consumer, job, number, chunk, models, lease_s)
        return None

    def _by_turn(self) -> Iterator[KeptJob]:
        jobs = self._state.active()
        tenants = sorted(
            {job.new.tenant for job in jobs}, key=lambda name: (self._state.tenants[name].virtual_time, name)
        )
        for tenant in tenants:
            own = [job for job in jobs if job.new.tenant == tenant]
            yield from sorted(own, key=lambda job: (job.virtual_time, job.new.id))

    def _take(
        self,
        consumer: str,
        job: KeptJob,
        number: int,
        chunk: KeptChunk,
        models: Mapping[str, Sequence[str]],
        lease_s: float,
    ) -> Claim:
        tenant = self._state.tenants[job.new.tenant]
        if job.status is Status.QUEUED and job.move(Status.RUNNING):
            job.started_at, job.model_version = self._state.clock(), models[job.new.model][0]
        if chunk.generation == 0:
            job.virtual_time += chunk.plan.row_count
            tenant.virtual_time += chunk.plan.row_count / tenant.weight
        chunk.generation += 1
        chunk.token = str(uuid4())
        chunk.lease = Lease(consumer, self._state.until(lease_s))
        return Claim(
            chunk=ChunkId(job.new.id, number), generation=chunk.generation, token=chunk.token, plan=chunk.plan,
            tenant=job.new.tenant, weight=tenant.weight, status=job.status, model=job.new.model,
            model_version=job.model_version, truncate=job.new.truncate, input_key=job.new.input_key,
            has_lines=job.new.has_lines, suspects=chunk.suspects, error_code=job.error[0], error_message=job.error[1],
            request_id=job.new.request_id,
        )  # fmt: skip

    async def renew(
        self, consumer: str, claims: Mapping[ChunkId, int], epoch: int, rows_in_flight: int, lease_s: float
    ) -> Renewal:
        now = self._state.clock()
        earlier = self._state.consumers.get(consumer)
        started_at = now if earlier is None else earlier.started_at
        self._state.consumers[consumer] = ConsumerState(consumer, epoch, rows_in_flight, started_at, now)
        lost: set[ChunkId] = set()
        ending: dict[ChunkId, Status] = {}
        for where, generation in claims.items():
            chunk = self._state.chunk(where)
            # A claim that is done is no lost one: its consumer may not have heard of it yet.
            if chunk is None or chunk.generation != generation or chunk.token is None:
                lost.add(where)
                continue
            if chunk.done is None:
                chunk.lease.until = self._state.until(lease_s)
            if not (status := self._state.jobs[where.job].status).runs:
                ending[where] = status
        return Renewal(frozenset(lost), ending, self._state.control)

    async def complete(self, claim: Claim, done: Done) -> bool:
        rules.check_done(claim, done)
        chunk = self._state.chunk(claim.chunk)
        if chunk is None:
            return False
        if chunk.held_by(claim):
            chunk.done, chunk.lease, chunk.suspects = done, Lease(), {}
            return True
        again = (chunk.generation, chunk.token) == (claim.generation, claim.token)
        return again and chunk.done is not None and chunk.done.part_key == done.part_key

    async def release(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            chunk = self._state.chunk(claim.chunk)
            if chunk is not None and chunk.held_by(claim):
                chunk.token, chunk.lease = None, Lease()

    async def remember(self, claim: Claim, suspects: Mapping[int, Suspect]) -> bool:
        chunk = self._state.chunk(claim.chunk)
        if chunk is None or not chunk.held_by(claim):
            return False
        chunk.suspects = dict(suspects)
        return True

    async def leave(self, consumer: str) -> None:
        self._state.consumers.pop(consumer, None)

    async def fail(self, job_id: str, code: str, message: str) -> Job | None:
        job = self._state.jobs.get(job_id)
        if job is None or not job.move(Status.FAILING):
            return None
        job.error = (code, message)
        return job.record()

    async def set_paused(self, paused: bool) -> Control:
        control = self._state.control
        if control.paused != paused:
            self._state.control = Control(control.epoch + 1, paused)
        return self._state.control

    async def bulk_state(self, consumer_ttl_s: float) -> BulkState:
        since = self._state.clock() - timedelta(seconds=consumer_ttl_s)
        live = [found for _, found in sorted(self._state.consumers.items()) if found.seen_at > since]
        return rules.bulk_state(self._state.control, live)


def _may_run(job: KeptJob, models: Mapping[str, Sequence[str]]) -> bool:
    if not job.status.runs:
        return True
    versions = models.get(job.new.model, ())
    return bool(versions) if job.model_version is None else job.model_version in versions
