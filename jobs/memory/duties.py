"""The housekeeper's duties, in memory."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta

from jobs import rules
from jobs.memory.state import KeptDuty, KeptJob, Lease, State
from jobs.records import Job, Notification
from jobs.states import CLOSES_AS, Status


class MemoryDuties:
    """The part ``Duties`` of the ledger."""

    _state: State

    async def close_due(self, limit: int) -> Sequence[Job]:
        closed = self._closable()[:limit]
        for job in closed:
            job.frozen = job.counts
            job.move(CLOSES_AS[job.status])
            job.finished_at = self._state.clock()
            job.expires_at = self._state.until(job.new.result_ttl_s)
            self._state.notify("ended", job)
        return [job.record() for job in closed]

    def _closable(self) -> list[KeptJob]:
        return [job for job in self._state.active() if not any(job.open_chunks())]

    async def expire_due(self, limit: int) -> Sequence[Job]:
        overdue = self._overdue()[:limit]
        return [job.record() for job in overdue if job.move(Status.EXPIRING)]

    def _overdue(self) -> list[KeptJob]:
        now = self._state.clock()
        jobs = self._state.active()
        return [job for job in jobs if job.status.runs and job.deadline_at <= now and any(job.open_chunks())]

    async def retire_due(self, limit: int) -> Sequence[Job]:
        retired = self._retirable()[:limit]
        for job in retired:
            self._state.bury(job)
        return [job.record() for job in retired]

    def _retirable(self) -> list[KeptJob]:
        now = self._state.clock()
        ended = [job for job in self._state.jobs.values() if job.deleted_at is None and job.expires_at is not None]
        return [job for job in ended if job.expires_at is not None and job.expires_at <= now]

    async def forget_due(self, limit: int, idempotency_ttl_s: float) -> int:
        state = self._state
        old = state.clock() - timedelta(seconds=idempotency_ttl_s)
        keys = [name for name, key in state.keys.items() if key.created_at <= old][:limit]
        # An event that was not told yet still needs its job.
        untold = {notification.job.new.id for notification in state.notifications.values()}
        gone = [id_ for id_, job in state.jobs.items() if job.deleted_at is not None and job.deleted_at <= old]
        gone = [job_id for job_id in gone if job_id not in untold][:limit]
        for name in keys:
            del state.keys[name]
        for job_id in gone:
            del state.jobs[job_id]
        state.consumers = {name: found for name, found in state.consumers.items() if found.seen_at > old}
        return len(keys) + len(gone)

    async def take_notifications(self, consumer: str, limit: int, lease_s: float) -> Sequence[Notification]:
        now = self._state.clock()
        taken: list[Notification] = []
        under_way: set[str] = set()
        for number, found in list(self._state.notifications.items()):
            job_id = found.job.new.id
            if not found.lease.free(now):
                # A job's end is not told before its acceptance.
                under_way.add(job_id)
            elif job_id not in under_way and len(taken) < limit:
                found.lease = Lease(consumer, self._state.until(lease_s))
                job = found.job.record()
                taken.append(
                    Notification(number, found.kind, rules.at_acceptance(job) if found.kind == "accepted" else job)
                )
        return taken

    async def drop_notifications(self, ids: Sequence[int]) -> None:
        for number in ids:
            self._state.notifications.pop(number, None)

    async def take_garbage(self, consumer: str, limit: int, lease_s: float) -> Sequence[str]:
        now = self._state.clock()
        free = [prefix for prefix, lease in self._state.garbage.items() if lease.free(now)][:limit]
        for prefix in free:
            self._state.garbage[prefix] = Lease(consumer, self._state.until(lease_s))
        return sorted(free)

    async def drop_garbage(self, prefixes: Sequence[str]) -> None:
        for prefix in prefixes:
            self._state.garbage.pop(prefix, None)

    async def take_duty(self, name: str, consumer: str, interval_s: float, lease_s: float) -> bool:
        now = self._state.clock()
        duty = self._state.periodic.setdefault(name, KeptDuty(Lease()))
        due = duty.ended_at is None or duty.ended_at + timedelta(seconds=interval_s) <= now
        if not due or not duty.lease.free(now):
            return False
        duty.lease = Lease(consumer, self._state.until(lease_s))
        return True

    async def end_duty(self, name: str, consumer: str) -> None:
        duty = self._state.periodic.get(name)
        if duty is not None and duty.lease.by == consumer:
            self._state.periodic[name] = KeptDuty(Lease(), self._state.clock())

    async def referenced(self, keys: Sequence[str]) -> frozenset[str]:
        return frozenset(key for key in keys if self._is_referenced(key))

    def _is_referenced(self, key: str) -> bool:
        own = rules.own_key(key)
        if own is None:
            return True
        upload = self._state.uploads.get(own.job)
        if upload is not None and upload.key == key:
            return True
        job = self._state.jobs.get(own.job)
        if job is not None and job.deleted_at is None and job.new.input_key == key:
            return True
        chunk = None if own.chunk is None else self._state.chunk(own.chunk)
        if chunk is None:
            return False
        return chunk.token == own.token if chunk.done is None else chunk.done.part_key == key

    async def duties(self) -> Mapping[str, int]:
        state, now = self._state, self._state.clock()
        chunks = (chunk for job in state.active() for _, chunk in job.open_chunks())
        return {
            "chunk": sum(chunk.lease.free(now) for chunk in chunks),
            "close": len(self._closable()),
            "expire": len(self._overdue()),
            "retire": len(self._retirable()),
            "upload": sum(upload.expires_at <= now for upload in state.uploads.values()),
            "garbage": sum(lease.free(now) for lease in state.garbage.values()),
            "notification": sum(found.lease.free(now) for found in state.notifications.values()),
        }

    async def wanted(self) -> Mapping[str, frozenset[str | None]]:
        versions: dict[str, set[str | None]] = defaultdict(set)
        for job in self._state.active():
            if job.status.runs:
                versions[job.new.model].add(job.model_version)
        return {model: frozenset(found) for model, found in versions.items()}

    async def jobs_wanting(self, model: str, version: str | None, limit: int) -> Sequence[str]:
        jobs = [job for job in self._state.active() if job.status.runs and job.new.model == model]
        jobs.sort(key=lambda job: (job.created_at, job.new.id))
        return [job.new.id for job in jobs if job.model_version == version][:limit]
