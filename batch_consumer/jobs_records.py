"""Records of the jobs topic: each becomes a job, or a dead letter and the news of its refusal; nothing for a tombstone."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import structlog

from batch_consumer.events import Events
from batch_consumer.metrics import Metrics
from batch_consumer.records import Source, header
from batch_consumer.results import SKIPPED_TOMBSTONE, Arrived
from jobs.forms import MAX_KEY_CHARS, JobRequest, check_idempotency_key, parse_body
from jobs.intake import Submitter
from jobs.records import Accepted
from serving.codec import decode_json
from serving.crashpoint import crashpoint
from serving.errors import IdempotencyMismatch, JobError, RowError
from serving.settings import ConsumerSettings, JobsSettings
from serving.telemetry import extract_context, inject_headers, span

log = structlog.get_logger(__name__)

SKIPPED_REFUSED = "refused_job"
MAX_REQUEST_ID_CHARS = 128


class JobsIntake(Protocol):
    """What makes jobs of submissions."""

    async def submit(
        self,
        request: JobRequest,
        submitter: Submitter,
        body: AsyncIterator[bytes] | None,
        idempotency_key: str | None,
        request_id: str | None,
        source: Mapping[str, Any] | None,
    ) -> Accepted:
        """Store the input and accept the job."""
        ...


class JobsRecords:
    """Brings one record after the other to its end."""

    def __init__(
        self, settings: ConsumerSettings, jobs: JobsSettings, intake: JobsIntake, events: Events, metrics: Metrics
    ) -> None:
        # Whose keys give the tenant a weight says so to the gateway, not here.
        self._submitter = Submitter(settings.jobs_tenant, None, None)
        self._offload_bytes = settings.offload_bytes
        self._jobs = jobs
        self._intake = intake
        self._events = events
        self._metrics = metrics

    async def take(self, message: Any) -> None:
        """Accept or refuse one of aiokafka's messages; may be repeated, the job stays the same.

        Raises ServerError or QuotaError where it has to be tried again.
        """
        if message.value is None:
            self._metrics.skipped.labels(SKIPPED_TOMBSTONE).inc()
            return
        with span("twodoor.job_record", extract_context(_trace(message))):
            await self._submit(message)
        crashpoint("after_job_accept")

    async def _submit(self, message: Any) -> None:
        source = Source(message.topic, message.partition, message.offset)
        own_key = header(message.headers, "idempotency-key")
        try:
            if own_key is not None:
                check_idempotency_key(own_key)
            await self._intake.submit(
                await self._parse(message.value),
                self._submitter,
                None,
                _made_key(message) if own_key is None else own_key,
                _request_id(message, source),
                {"topic": source.topic, "partition": source.partition, "offset": source.offset},
            )
        except IdempotencyMismatch as error:
            if own_key is None:
                # Nobody else uses the key of a record: it was accepted before, and its job was deleted since.
                log.info("a job's record came again after its end", partition=source.partition, offset=source.offset)
                return
            await self._refuse(message, source, error)
        except (JobError, RowError) as error:
            await self._refuse(message, source, error)

    async def _parse(self, value: bytes) -> JobRequest:
        if len(value) > self._offload_bytes:
            return await asyncio.to_thread(_read, value, self._jobs)
        return _read(value, self._jobs)

    async def _refuse(self, message: Any, source: Source, error: JobError | RowError) -> None:
        arrived = Arrived(source, message.key, message.value, message.headers)
        await self._events.refuse(arrived, error, inject_headers())
        self._metrics.skipped.labels(SKIPPED_REFUSED).inc()
        log.info("job refused", partition=source.partition, offset=source.offset, code=error.code)


def _read(value: bytes, settings: JobsSettings) -> JobRequest:
    return parse_body(decode_json(value), settings)


def _made_key(message: Any) -> str:
    """Return the key of a record that has none. The timestamp tells records of a topic made anew from the old ones."""
    return f"{message.topic}-{message.partition}-{message.offset}-{message.timestamp}"[-MAX_KEY_CHARS:]


def _request_id(message: Any, source: Source) -> str:
    given = header(message.headers, "x-request-id") or ""
    return given if given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARS else source.default_id


def _trace(message: Any) -> dict[str, str]:
    found = {name: header(message.headers, name) for name in ("traceparent", "tracestate")}
    return {name: value for name, value in found.items() if value is not None}
