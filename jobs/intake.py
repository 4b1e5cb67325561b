"""From a request to an accepted job, the same for every entrance: store the input, cut it, then all or nothing.

The upload's row precedes its first byte and is renewed while the caller sends, however slowly. Whatever goes wrong
before the ledger has the job, the upload is given up by compare-and-set, and only who wins that deletes the object.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import structlog

from jobs.acceptance import Acceptance, to_the_end
from jobs.cutter import Cutter
from jobs.forms import JobRequest, check_idempotency_key, import_key
from jobs.ledger import Ledger, input_key
from jobs.objects import ObjectMissing, Objects
from jobs.records import Accepted, ChunkPlan, NewJob
from jobs.rules import mismatch
from jobs.states import Status
from jobs.uploads import BLOCK_BYTES, Fingerprint, Renewal, as_jsonl, blocks
from serving.crashpoint import crashpoint
from serving.errors import DependencyDown, EmptyInput, InvalidJob, QuotaExceeded
from serving.settings import JobsSettings

_QUOTA_RETRY_S = 5.0
_log = structlog.get_logger("jobs")


@dataclass(frozen=True, slots=True)
class Submitter:
    """Who submits: a tenant, its share, and how many of its rows may wait (None: as many as it likes)."""

    tenant: str
    weight: float | None = 1.0
    """None: the tenant keeps the one it has."""
    max_queued_rows: int | None = None


@dataclass(frozen=True, slots=True)
class _Order:
    """One submission as it came in."""

    request: JobRequest
    submitter: Submitter
    idempotency_key: str | None
    request_id: str | None
    source: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Input:
    """An input that lies in the object store, and how it is cut."""

    key: str
    size_bytes: int
    row_count: int
    chunks: Sequence[ChunkPlan]
    fingerprint: bytes


class JobIntake:
    """Takes submissions for both doors."""

    def __init__(self, ledger: Ledger, objects: Objects, settings: JobsSettings) -> None:
        self._ledger, self._objects, self._settings = ledger, objects, settings

    async def submit(
        self,
        request: JobRequest,
        submitter: Submitter,
        body: AsyncIterator[bytes] | None = None,
        idempotency_key: str | None = None,
        request_id: str | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> Accepted:
        """Accept a job, or return the one that the same Idempotency-Key made before.

        ``body`` is the decoded JSONL, given exactly where the request holds neither inputs nor input_object; what it
        raises (a cut body, one over the limit) passes, after everything is cleaned up. Raises InvalidJob, EmptyInput,
        QuotaExceeded, IdempotencyMismatch, DependencyDown. After DependencyDown the job may be in: with an
        Idempotency-Key a caller asks again without harm.
        """
        if idempotency_key is not None:
            check_idempotency_key(idempotency_key)
        order = _Order(request, submitter, idempotency_key, request_id, source)
        if request.input_object is not None:
            accepted = await self._submit_import(order, request.input_object)
        else:
            accepted = await self._submit_rows(order, body)
        _tell(accepted, request_id)
        return accepted

    async def _submit_import(self, order: _Order, name: str) -> Accepted:
        key = import_key(order.submitter.tenant, name)
        fingerprint = Fingerprint(order.request)  # the name stands for the bytes, which are the user's
        if (replay := await self._replay(order, fingerprint, None)) is not None:
            return replay
        await self._check_quota(order)
        try:
            async with aclosing(self._objects.stream(key)) as stream:
                found = await self._take(order, key, stream, fingerprint, "input_object")
        except ObjectMissing:
            raise InvalidJob(f"there is no object {name}", field="input_object") from None
        crashpoint("before_accept")
        acceptance = Acceptance(self._ledger, self._new_job(order, new_job_id(), found), found.chunks)
        accepted = await to_the_end(acceptance.accept())
        crashpoint("after_accept")
        return accepted

    async def _submit_rows(self, order: _Order, body: AsyncIterator[bytes] | None) -> Accepted:
        if order.request.inputs is not None:
            async with aclosing(as_jsonl(order.request.inputs)) as lines:
                return await self._submit_body(order, lines)
        if body is None:
            raise ValueError("a request without inputs comes with a body")
        return await self._submit_body(order, body)

    async def _submit_body(self, order: _Order, body: AsyncIterator[bytes]) -> Accepted:
        fingerprint = Fingerprint(order.request)
        if (replay := await self._replay(order, fingerprint, body)) is not None:
            return replay
        await self._check_quota(order)
        job_id = new_job_id()
        key = input_key(job_id)
        ttl_s = self._settings.upload_ttl_s
        await self._ledger.open_upload(job_id, order.submitter.tenant, key, ttl_s)
        acceptance: Acceptance | None = None
        try:
            async with Renewal(self._ledger, job_id, ttl_s) as renewal:
                found = await self._upload(order, key, body, fingerprint, renewal)
                crashpoint("after_upload")
                acceptance = Acceptance(self._ledger, self._new_job(order, job_id, found), found.chunks)
                crashpoint("before_accept")
                accepted = await to_the_end(acceptance.accept())
                crashpoint("after_accept")
                return accepted
        finally:
            if acceptance is None or not acceptance.may_own_input:
                await to_the_end(self._give_up(job_id, key))

    async def _upload(
        self, order: _Order, key: str, body: AsyncIterator[bytes], fingerprint: Fingerprint, renewal: Renewal
    ) -> _Input:
        field = "inputs" if order.request.inputs is not None else "body"
        async with self._objects.writer(key) as writer:

            async def stored() -> AsyncGenerator[bytes, None]:
                async with aclosing(blocks(body, BLOCK_BYTES)) as even:
                    async for block in even:
                        renewal.check()
                        await writer.write(block)
                        yield block

            async with aclosing(stored()) as stream:
                return await self._take(order, key, stream, fingerprint, field)

    async def _take(
        self, order: _Order, key: str, stream: AsyncIterator[bytes], fingerprint: Fingerprint, field: str
    ) -> _Input:
        """Cut (and for our own uploads fingerprint) a stream of bytes, off the event loop's thread."""
        cutter = Cutter(self._settings, field)
        hashed = order.request.input_object is None
        chunks: list[ChunkPlan] = []

        def work(block: bytes) -> Sequence[ChunkPlan]:
            if hashed:
                fingerprint.update(block)
            return cutter.feed(block)

        async for block in stream:
            chunks += await asyncio.to_thread(work, block)
            _check_rows(order.submitter, cutter.row_count)
        chunks += cutter.finish()
        if not chunks:
            raise EmptyInput("the input holds no row")
        return _Input(key, cutter.size_bytes, cutter.row_count, chunks, fingerprint.digest())

    async def _replay(
        self, order: _Order, fingerprint: Fingerprint, body: AsyncIterator[bytes] | None
    ) -> Accepted | None:
        """Return the key's earlier job where there is one; then the body is only hashed, never stored."""
        if order.idempotency_key is None:
            return None
        known = await self._ledger.find_replay(order.submitter.tenant, order.idempotency_key)
        if known is None:
            return None
        job, wanted = known
        if job is None:
            raise mismatch()
        if body is not None:
            async for block in blocks(body, BLOCK_BYTES):
                await asyncio.to_thread(fingerprint.update, block)
        if fingerprint.digest() != wanted:
            raise mismatch()
        return Accepted(job, replayed=True)

    async def _check_quota(self, order: _Order) -> None:
        """Refuse before the upload what is sure to be refused after it; the ledger decides in the job's transaction."""
        most = order.submitter.max_queued_rows
        if most is not None and await self._ledger.queued_rows(order.submitter.tenant) >= most:
            raise QuotaExceeded(f"{most} rows wait already", _QUOTA_RETRY_S, most)

    async def _give_up(self, job_id: str, key: str) -> None:
        try:
            if await self._ledger.drop_upload(job_id):
                await self._objects.delete([key])
        except DependencyDown:
            _log.warning("upload_left_to_sweeper", job=job_id)

    def _new_job(self, order: _Order, job_id: str, found: _Input) -> NewJob:
        request, submitter, settings = order.request, order.submitter, self._settings
        return NewJob(
            id=job_id,
            tenant=submitter.tenant,
            weight=submitter.weight,
            model=request.model,
            truncate=request.truncate,
            metadata=request.metadata,
            input_key=found.key,
            input_bytes=found.size_bytes,
            has_lines=request.inputs is None,
            row_count=found.row_count,
            completion_window_s=request.completion_window_s or settings.completion_window_s,
            result_ttl_s=request.result_ttl_s or settings.result_ttl_s,
            fingerprint=found.fingerprint,
            uploaded=request.input_object is None,
            idempotency_key=order.idempotency_key,
            max_queued_rows=submitter.max_queued_rows,
            request_id=order.request_id,
            source=order.source,
        )


def _tell(accepted: Accepted, request_id: str | None) -> None:
    job = accepted.job
    if accepted.replayed:
        _log.info("job_replayed", job=job.id, status=job.status.value, request_id=request_id, tenant=job.tenant)
        return
    _log.info(
        "job",
        job=job.id,
        from_status=None,
        to_status=Status.QUEUED.value,
        request_id=request_id,
        tenant=job.tenant,
        model=job.model,
        rows=job.rows_total,
    )


def new_job_id() -> str:
    """Return an id that no job has."""
    return f"job_{uuid.uuid4().hex}"


def _check_rows(submitter: Submitter, rows: int) -> None:
    most = submitter.max_queued_rows
    if most is not None and rows > most:
        raise QuotaExceeded(f"the job has more rows than may wait ({most})", _QUOTA_RETRY_S, most)
