"""Uploads, acceptance and what callers ask of their jobs, in memory."""

from collections.abc import Sequence

from jobs import rules
from jobs.ledger import job_prefix
from jobs.memory.state import KeptChunk, KeptJob, KeptKey, KeptTenant, KeptUpload, Lease, State
from jobs.records import Accepted, ChunkPlan, Job, NewJob, Page, Part
from jobs.states import Status
from serving.errors import JobNotEnded, UnknownJob


class MemoryIntake:
    """The parts ``Uploads`` and ``Intake`` of the ledger."""

    _state: State

    async def open_upload(self, job_id: str, tenant: str, key: str, ttl_s: float) -> None:
        upload = self._state.uploads.setdefault(job_id, KeptUpload(tenant, key, self._state.clock()))
        upload.expires_at = self._state.until(ttl_s)

    async def renew_upload(self, job_id: str, ttl_s: float) -> bool:
        upload = self._state.uploads.get(job_id)
        if upload is not None:
            upload.expires_at = self._state.until(ttl_s)
        return upload is not None

    async def drop_upload(self, job_id: str) -> bool:
        return self._state.uploads.pop(job_id, None) is not None

    async def take_expired_uploads(self, limit: int) -> Sequence[str]:
        now = self._state.clock()
        expired = [job_id for job_id, upload in self._state.uploads.items() if upload.expires_at <= now][:limit]
        for job_id in expired:
            del self._state.uploads[job_id]
            self._state.garbage.setdefault(job_prefix(job_id), Lease())
        return expired

    async def queued_rows(self, tenant: str) -> int:
        return sum(chunk.plan.row_count for job in self._state.active(tenant) for _, chunk in job.open_chunks())

    async def accept(self, job: NewJob, chunks: Sequence[ChunkPlan]) -> Accepted:
        rules.check(job, chunks)
        rules.as_json("metadata", job.metadata)
        state = self._state
        tenant = state.tenants.setdefault(job.tenant, KeptTenant(1.0 if job.weight is None else job.weight))
        if job.id in state.jobs:
            return Accepted(state.jobs[job.id].record(), False)
        if (earlier := self._replayed(job)) is not None:
            return Accepted(earlier, True)
        if job.max_queued_rows is not None and await self.queued_rows(job.tenant) + job.row_count > job.max_queued_rows:
            raise rules.over_quota(job)
        if job.uploaded:
            upload = state.uploads.get(job.id)
            if upload is None or upload.tenant != job.tenant:
                raise rules.swept()
            del state.uploads[job.id]
        if job.weight is not None:
            tenant.weight = job.weight
        siblings = state.active(job.tenant)
        if not siblings:
            active = {other.new.tenant for other in state.active()}
            times = [state.tenants[name].virtual_time for name in active]
            # Where nobody is active all start level, so that nobody pays for what it used while it was alone.
            floor = min(times) if times else max(kept.virtual_time for kept in state.tenants.values())
            tenant.virtual_time = max(tenant.virtual_time, floor)
        start = min((sibling.virtual_time for sibling in siblings), default=0.0)
        kept = KeptJob(job, [KeptChunk(plan) for plan in chunks], state.clock(), start)
        state.jobs[job.id] = kept
        if job.idempotency_key is not None:
            state.keys[job.tenant, job.idempotency_key] = KeptKey(job.id, job.fingerprint, state.clock())
        state.notify("accepted", kept)
        return Accepted(kept.record(), False)

    def _replayed(self, job: NewJob) -> Job | None:
        key = None if job.idempotency_key is None else self._state.keys.get((job.tenant, job.idempotency_key))
        if key is None:
            return None
        earlier = self._state.jobs.get(key.job_id)
        if earlier is None or earlier.deleted_at is not None or key.fingerprint != job.fingerprint:
            raise rules.mismatch()
        return earlier.record()

    async def find_replay(self, tenant: str, idempotency_key: str) -> tuple[Job | None, bytes] | None:
        key = self._state.keys.get((tenant, idempotency_key))
        if key is None:
            return None
        job = self._state.jobs.get(key.job_id)
        return (None if job is None or job.deleted_at is not None else job.record()), key.fingerprint

    async def get(self, tenant: str, job_id: str) -> Job:
        return self._state.visible(tenant, job_id).record()

    async def list_jobs(self, tenant: str, statuses: Sequence[Status] | None, after: str | None, limit: int) -> Page:
        jobs = [job for job in self._state.jobs.values() if job.new.tenant == tenant]
        jobs.sort(key=_order, reverse=True)
        if after is not None:
            # Deleted ones too: their id still works as a cursor.
            cursor = next((job for job in jobs if job.new.id == after), None)
            if cursor is None:
                raise UnknownJob("there is no such job")
            jobs = [job for job in jobs if _order(job) < _order(cursor)]
        shown = [job for job in jobs if job.deleted_at is None and (statuses is None or job.status in statuses)]
        return Page([job.record() for job in shown[:limit]], len(shown) > limit)

    async def parts(self, tenant: str, job_id: str) -> Sequence[Part]:
        found: list[Part] = []
        for chunk in self._state.visible(tenant, job_id).chunks:
            if chunk.done is None:
                break
            done, plan = chunk.done, chunk.plan
            found.append(Part(done.part_key, plan.first_row, plan.row_count, done.result_bytes, done.error_bytes))
        return found

    async def cancel(self, tenant: str, job_id: str) -> tuple[Job, bool]:
        job = self._state.visible(tenant, job_id)
        began = job.move(Status.CANCELLING)
        return job.record(), began

    async def delete(self, tenant: str, job_id: str) -> None:
        job = self._state.visible(tenant, job_id)
        if not job.status.ended:
            raise JobNotEnded("the job has not ended: cancel it first, or wait for its end")
        self._state.bury(job)


def _order(job: KeptJob) -> tuple[object, str]:
    return job.created_at, job.new.id
