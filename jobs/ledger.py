"""The ledger: every durable fact of a job, behind one interface that PostgreSQL and a store in memory both keep.

Each method is one transaction and may be repeated: a caller whose connection broke asks again. All raise
DependencyDown where the store does not answer in time. The clock is the store's own.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from jobs.records import (
    Accepted,
    BulkState,
    ChunkId,
    ChunkPlan,
    Claim,
    Control,
    Done,
    Job,
    NewJob,
    Notification,
    Page,
    Part,
    Renewal,
    Suspect,
)
from jobs.states import Status


class Uploads(Protocol):
    """The first half of intake: an upload is known before its first byte."""

    async def open_upload(self, job_id: str, tenant: str, key: str, ttl_s: float) -> None:
        """Record that ``key`` is being written for a job to come."""
        ...

    async def renew_upload(self, job_id: str, ttl_s: float) -> bool:
        """Say that the upload lives; False where it has been swept."""
        ...

    async def drop_upload(self, job_id: str) -> bool:
        """Give the upload up by compare-and-set; True where it was still open, so that its object may be deleted."""
        ...

    async def take_expired_uploads(self, limit: int) -> Sequence[str]:
        """Turn uploads without a sign of life into garbage, by the same compare-and-set; returns their jobs' ids."""
        ...


class Intake(Protocol):
    """The second half of intake, and what callers may read and ask of their jobs. Another tenant's job is unknown."""

    async def queued_rows(self, tenant: str) -> int:
        """Return how many accepted rows of the tenant have no result yet."""
        ...

    async def accept(self, job: NewJob, chunks: Sequence[ChunkPlan]) -> Accepted:
        """Close the upload, insert job, chunks and idempotency key: all or nothing.

        The tenant (and the job within it) starts level with the least virtual time among the active ones.
        Raises QuotaExceeded, IdempotencyMismatch, or DependencyDown where the upload was swept meanwhile. A replay
        leaves the new upload open: the caller drops it. Repeating it for a job that is in already returns that job.
        """
        ...

    async def find_replay(self, tenant: str, idempotency_key: str) -> tuple[Job | None, bytes] | None:
        """Return the key's job (None where it was deleted since) and its fingerprint, or None for a new key."""
        ...

    async def get(self, tenant: str, job_id: str) -> Job:
        """Return a job; raises UnknownJob."""
        ...

    async def list_jobs(self, tenant: str, statuses: Sequence[Status] | None, after: str | None, limit: int) -> Page:
        """Return jobs newest first (created_at, id), those behind the job ``after``; raises UnknownJob for the cursor.

        A cursor whose job was deleted since still works as long as the id is remembered.
        """
        ...

    async def parts(self, tenant: str, job_id: str) -> Sequence[Part]:
        """Return the parts of the finished prefix in row order: all of them once the job has ended."""
        ...

    async def cancel(self, tenant: str, job_id: str) -> tuple[Job, bool]:
        """Begin to cancel; returns the job and whether this call began it. Raises UnknownJob."""
        ...

    async def delete(self, tenant: str, job_id: str) -> None:
        """Remove an ended job: chunks go, objects become garbage, the id is remembered. Raises UnknownJob, JobNotEnded."""
        ...


class Bulk(Protocol):
    """The operator's hand on all consumers."""

    async def set_paused(self, paused: bool) -> Control:
        """Pause or resume; the epoch grows where that changes anything."""
        ...

    async def bulk_state(self, consumer_ttl_s: float) -> BulkState:
        """Return the state over all consumers seen within ``consumer_ttl_s``."""
        ...


class Work(Protocol):
    """What consumers do with chunks."""

    async def claim(
        self, consumer: str, models: Mapping[str, Sequence[str]], full_jobs: Sequence[str], lease_s: float
    ) -> Claim | None:
        """Claim the next chunk, or None.

        From the tenant with the least virtual time, then the job with the least within it; then its first claimable
        chunk (open, and not leased or its lease over), skipping rows others have locked. Generation + 1, a new token.
        ``models``: model → versions this consumer can run, the one for new jobs first. A job that runs is claimed only
        where its pinned version is among them (a job without one pins the first); one that is ending needs no model.
        ``full_jobs`` are passed over. The first claim makes a queued job running. The rows are added to both virtual
        times (÷ weight for the tenant), but only at a chunk's first claim.
        """
        ...

    async def renew(
        self, consumer: str, claims: Mapping[ChunkId, int], epoch: int, rows_in_flight: int, lease_s: float
    ) -> Renewal:
        """Heartbeat, one statement: renew the leases whose generation (the mapping's value) is unchanged, also those that
        had run out, record the epoch obeyed and the rows in flight."""
        ...

    async def complete(self, claim: Claim, done: Done) -> bool:
        """Compare-and-set the chunk to done with its part; False where the generation has moved on. True also where this
        very claim has done it before (the answer was lost)."""
        ...

    async def release(self, claims: Sequence[Claim]) -> None:
        """Give claims back unfinished, without waiting for their leases; those that are lost already are passed over."""
        ...

    async def remember(self, claim: Claim, suspects: Mapping[int, Suspect]) -> bool:
        """Replace what the chunk row remembers of its suspects; False where the claim is lost."""
        ...

    async def leave(self, consumer: str) -> None:
        """Forget a consumer that stops."""
        ...

    async def fail(self, job_id: str, code: str, message: str) -> Job | None:
        """Begin to fail a job that is queued or running; returns it where this call began it."""
        ...


class Duties(Protocol):
    """What nobody else owns; any consumer's housekeeper does it."""

    async def close_due(self, limit: int) -> Sequence[Job]:
        """Close jobs without an open chunk: lock, freeze the counts, set status and expires_at, insert notifications."""
        ...

    async def expire_due(self, limit: int) -> Sequence[Job]:
        """Begin to expire jobs whose deadline has passed and that have open chunks."""
        ...

    async def retire_due(self, limit: int) -> Sequence[Job]:
        """Remove ended jobs whose results have expired, as ``delete`` does."""
        ...

    async def forget_due(self, limit: int, idempotency_ttl_s: float) -> int:
        """Purge deleted jobs' rows and idempotency keys that are older than ``idempotency_ttl_s``."""
        ...

    async def take_notifications(self, consumer: str, limit: int, lease_s: float) -> Sequence[Notification]:
        """Lease due notifications, oldest first."""
        ...

    async def drop_notifications(self, ids: Sequence[int]) -> None:
        """Remove notifications that have been told."""
        ...

    async def take_garbage(self, consumer: str, limit: int, lease_s: float) -> Sequence[str]:
        """Lease prefixes of objects to delete."""
        ...

    async def drop_garbage(self, prefixes: Sequence[str]) -> None:
        """Remove prefixes whose objects are gone."""
        ...

    async def take_duty(self, name: str, consumer: str, interval_s: float, lease_s: float) -> bool:
        """Lease a periodic duty that is due (``interval_s`` after its last end)."""
        ...

    async def end_duty(self, name: str, consumer: str) -> None:
        """Say that a periodic duty is done for this time."""
        ...

    async def referenced(self, keys: Sequence[str]) -> frozenset[str]:
        """Return those object keys that an upload, a job, a done chunk or the current claim of an open chunk refers to."""
        ...

    async def duties(self) -> Mapping[str, int]:
        """Return duty → how many wait now, from the view of the same name: chunk, close, expire, retire, upload,
        garbage, notification."""
        ...

    async def wanted(self) -> Mapping[str, frozenset[str | None]]:
        """Return model → versions that queued and running jobs have pinned (None: pinned none yet)."""
        ...

    async def jobs_wanting(self, model: str, version: str | None, limit: int) -> Sequence[str]:
        """Return ids of queued and running jobs of a model that have pinned this version (None: none yet)."""
        ...


class Ledger(Uploads, Intake, Bulk, Work, Duties, Protocol):
    """All of it."""

    async def ping(self) -> None:
        """Raise DependencyDown unless the store answers."""
        ...


def part_key(claim: Claim) -> str:
    """Return the object key of a claim's result part: no other claim ever writes there."""
    return f"{job_prefix(claim.chunk.job)}parts/{claim.chunk.number:08d}/{claim.token}"


def job_prefix(job_id: str) -> str:
    """Return the prefix of everything Twodoor stores for a job."""
    return f"jobs/{job_id}/"


def input_key(job_id: str) -> str:
    """Return the key of a job's uploaded input."""
    return f"{job_prefix(job_id)}input"
