"""What the ledger in memory holds: the tables of the real one as mutable objects, and the steps its methods share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from jobs.ledger import job_prefix
from jobs.records import ChunkId, ChunkPlan, Claim, ConsumerState, Control, Done, Job, NewJob, Suspect
from jobs.states import NEXT, Status
from serving.errors import UnknownJob

Clock = Callable[[], datetime]


def now_utc() -> datetime:
    """The clock of a store in use; tests bring one that they move."""
    return datetime.now(UTC)


@dataclass(slots=True)
class Lease:
    """Something taken by one consumer for a while."""

    by: str | None = None
    until: datetime | None = None

    def free(self, now: datetime) -> bool:
        return self.until is None or self.until <= now


@dataclass(slots=True)
class KeptChunk:
    """A chunk row."""

    plan: ChunkPlan
    generation: int = 0
    token: str | None = None
    lease: Lease = field(default_factory=Lease)
    suspects: Mapping[int, Suspect] = field(default_factory=dict)
    done: Done | None = None

    def held_by(self, claim: Claim) -> bool:
        """Whether this claim may still write: nobody has superseded it, and it was not given back."""
        return self.done is None and (self.generation, self.token) == (claim.generation, claim.token)


@dataclass(slots=True)
class KeptJob:
    """A job row with its chunks and its turn."""

    new: NewJob
    chunks: list[KeptChunk]
    created_at: datetime
    virtual_time: float
    status: Status = Status.QUEUED
    model_version: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    expires_at: datetime | None = None
    deleted_at: datetime | None = None
    frozen: tuple[int, int] | None = None
    error: tuple[str | None, str | None] = (None, None)

    @property
    def deadline_at(self) -> datetime:
        return self.created_at + timedelta(seconds=self.new.completion_window_s)

    @property
    def counts(self) -> tuple[int, int]:
        """Rows succeeded and failed: from the chunks, frozen at the end."""
        if self.frozen is not None:
            return self.frozen
        done = [chunk.done for chunk in self.chunks if chunk.done is not None]
        return sum(found.succeeded for found in done), sum(found.failed for found in done)

    def open_chunks(self) -> Iterator[tuple[int, KeptChunk]]:
        """The chunks that are not done, with their numbers."""
        return ((number, chunk) for number, chunk in enumerate(self.chunks) if chunk.done is None)

    def move(self, to: Status) -> bool:
        """Go to another state where the table allows it."""
        if to not in NEXT[self.status]:
            return False
        self.status = to
        return True

    def record(self) -> Job:
        """The job as the ledger gives it out."""
        succeeded, failed = self.counts
        return Job(
            id=self.new.id, tenant=self.new.tenant, status=self.status, model=self.new.model,
            model_version=self.model_version, truncate=self.new.truncate, metadata=self.new.metadata,
            rows_total=self.new.row_count, rows_succeeded=succeeded, rows_failed=failed, created_at=self.created_at,
            started_at=self.started_at, finished_at=self.finished_at, deadline_at=self.deadline_at,
            expires_at=self.expires_at, error_code=self.error[0], error_message=self.error[1],
            request_id=self.new.request_id, source=self.new.source,
        )  # fmt: skip


@dataclass(slots=True)
class KeptTenant:
    """A tenant row."""

    weight: float
    virtual_time: float = 0.0


@dataclass(slots=True)
class KeptUpload:
    """An upload row."""

    tenant: str
    key: str
    expires_at: datetime


@dataclass(slots=True)
class KeptKey:
    """An Idempotency-Key."""

    job_id: str
    fingerprint: bytes
    created_at: datetime


@dataclass(slots=True)
class KeptNotification:
    """A notification row."""

    kind: str
    job: KeptJob
    lease: Lease = field(default_factory=Lease)


@dataclass(slots=True)
class KeptDuty:
    """A periodic duty."""

    lease: Lease
    ended_at: datetime | None = None


@dataclass(slots=True)
class State:
    """All tables."""

    clock: Clock
    tenants: dict[str, KeptTenant] = field(default_factory=dict)
    jobs: dict[str, KeptJob] = field(default_factory=dict)
    uploads: dict[str, KeptUpload] = field(default_factory=dict)
    keys: dict[tuple[str, str], KeptKey] = field(default_factory=dict)
    notifications: dict[int, KeptNotification] = field(default_factory=dict)
    garbage: dict[str, Lease] = field(default_factory=dict)
    periodic: dict[str, KeptDuty] = field(default_factory=dict)
    consumers: dict[str, ConsumerState] = field(default_factory=dict)
    control: Control = field(default_factory=lambda: Control(0, False))
    told: int = 0

    def visible(self, tenant: str, job_id: str) -> KeptJob:
        """Return a tenant's job that was not removed; raises UnknownJob."""
        job = self.jobs.get(job_id)
        if job is None or job.new.tenant != tenant or job.deleted_at is not None:
            raise UnknownJob("there is no such job")
        return job

    def chunk(self, chunk: ChunkId) -> KeptChunk | None:
        """Return a chunk row, or None where its job was removed."""
        job = self.jobs.get(chunk.job)
        return job.chunks[chunk.number] if job is not None and chunk.number < len(job.chunks) else None

    def active(self, tenant: str | None = None) -> Sequence[KeptJob]:
        """Return the jobs that have not ended, of one tenant or of all."""
        return [
            job for job in self.jobs.values() if not job.status.ended and tenant in (None, job.new.tenant)
        ]  # fmt: skip

    def notify(self, kind: str, job: KeptJob) -> None:
        """Insert a notification for a job that came by topic."""
        if job.new.source is not None:
            self.told += 1
            self.notifications[self.told] = KeptNotification(kind, job)

    def bury(self, job: KeptJob) -> None:
        """Remove what is kept of an ended job, but for the memory of its id."""
        job.chunks = []
        job.deleted_at = self.clock()
        self.garbage.setdefault(job_prefix(job.new.id), Lease())

    def until(self, seconds: float) -> datetime:
        """Return the moment ``seconds`` from now."""
        return self.clock() + timedelta(seconds=seconds)
