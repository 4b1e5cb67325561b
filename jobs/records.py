"""What the ledger takes and gives: plain frozen values, the same for every store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from jobs.states import Status


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A run of neighbouring rows of the input, the unit of claiming.

    ``start_byte`` and ``end_byte`` (exclusive) are offsets in the input object, ``first_row`` counts rows from 0 and
    ``first_line`` physical lines from 1. An ``oversized`` chunk is one row over the limit: its bytes are never read.
    """

    start_byte: int
    end_byte: int
    first_row: int
    row_count: int
    first_line: int
    oversized: bool = False


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to accept. Its input object is complete, and its upload row open (None: an imported object, not ours)."""

    id: str
    tenant: str
    weight: float | None
    """The tenant's share from now on; None: it keeps the one it has, 1 where it has none yet."""
    model: str
    truncate: bool
    metadata: Mapping[str, Any]
    input_key: str
    input_bytes: int
    has_lines: bool
    """Whether the caller sent JSONL: only then do its errors name physical lines."""
    row_count: int
    completion_window_s: int
    result_ttl_s: int
    fingerprint: bytes
    """SHA-256 of model, options and body."""
    uploaded: bool = True
    idempotency_key: str | None = None
    max_queued_rows: int | None = None
    request_id: str | None = None
    source: Mapping[str, Any] | None = None
    """topic, partition, offset of a job that came by topic; its acceptance and end are told on the events topic."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the ledger knows it. Counts come from chunk rows; they are frozen when the job closes."""

    id: str
    tenant: str
    status: Status
    model: str
    model_version: str | None
    truncate: bool
    metadata: Mapping[str, Any]
    rows_total: int
    rows_succeeded: int
    rows_failed: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    deadline_at: datetime
    expires_at: datetime | None
    """When the results are removed; None before the end."""
    error_code: str | None = None
    error_message: str | None = None
    request_id: str | None = None
    source: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job of a submission; ``replayed`` where an earlier one with the same Idempotency-Key made it."""

    job: Job
    replayed: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Jobs newest first, ties by id."""

    jobs: Sequence[Job]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Part:
    """The result of one chunk: an object of ``result_bytes`` NDJSON, one line a row, then its error lines once more
    (``error_bytes``), so that either is one range of one object."""

    key: str
    first_row: int
    row_count: int
    result_bytes: int
    error_bytes: int


class ChunkId(NamedTuple):
    """A chunk of a job; ``number`` counts from 0."""

    job: str
    number: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """What is remembered of a row under suspicion: failures that were its own so far, and deaths under it alone."""

    attempts: int = 0
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """A chunk one consumer works on. ``generation`` and ``token`` (a UUID, new with each claim) fence it."""

    chunk: ChunkId
    generation: int
    token: str
    plan: ChunkPlan
    tenant: str
    weight: float
    status: Status
    """Of the job when the chunk was claimed: where it does not run, every row gets its line without the model."""
    model: str
    model_version: str | None
    """The version the job has pinned; None only where the job ended before its first chunk ran."""
    truncate: bool
    input_key: str
    has_lines: bool
    suspects: Mapping[int, Suspect] = field(default_factory=dict)
    """Row (counted from 0 within the chunk) → what is remembered of it."""
    error_code: str | None = None
    error_message: str | None = None
    """Why a FAILING job fails."""
    request_id: str | None = None
    """Of the submission that made the job."""

    @property
    def begins_job(self) -> bool:
        """Whether the job is running since this claim: true for one claim of a job (of two at the same moment, for one)."""
        return self.chunk.number == 0 and self.generation == 1 and self.status is Status.RUNNING


@dataclass(frozen=True, slots=True)
class Done:
    """What a consumer says of a finished chunk; ``succeeded + failed`` is the chunk's row count."""

    part_key: str
    succeeded: int
    failed: int
    result_bytes: int
    error_bytes: int


@dataclass(frozen=True, slots=True)
class Control:
    """The operator's wish: with each pause and resume the epoch grows by one."""

    epoch: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a heartbeat: which claims are lost, which jobs' claims no longer run, and the operator's wish."""

    lost: frozenset[ChunkId]
    ending: Mapping[ChunkId, Status]
    control: Control


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """One live consumer as `bulk status` shows it."""

    id: str
    epoch: int
    rows_in_flight: int
    started_at: datetime
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class BulkState:
    """``running``, ``pausing`` (some live consumer has not obeyed the epoch, or has rows in flight) or ``paused``."""

    state: str
    control: Control
    consumers: Sequence[ConsumerState]


@dataclass(frozen=True, slots=True)
class Notification:
    """An event to tell on the events topic: ``kind`` is ``accepted`` or ``ended``."""

    id: int
    kind: str
    job: Job
