"""The job routes: parse, call, render. Installed only where this door keeps jobs; otherwise they do not exist (404)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.answers import JSON
from gateway.body import content_type, wrong_type
from gateway.caller import while_there
from gateway.envelope import request_id_of
from gateway.job_door import JobDoor
from gateway.job_forms import check_job_id, idempotency_key, no_query, parse_list, parse_results, submit_query, wait_s
from gateway.keys import caller_of, require_admin
from gateway.results import NDJSON, results_response
from gateway.routes import deadline_of, decode, door_of
from jobs.forms import JobRequest, parse_body, parse_query
from jobs.intake import Submitter
from jobs.objects import ObjectMissing
from jobs.records import Accepted, BulkState, Job
from jobs.render import job_json, time_text
from jobs.states import Status
from serving.codec import encode_json
from serving.errors import DeadlineExceeded, DependencyDown, InvalidJob, JobNotEnded, Overloaded, UnknownModel

log = structlog.get_logger(__name__)

Handler = Callable[[Request, JobDoor], Awaitable[Response]]
_LINES = ("application/jsonl", NDJSON)
_ACCEPTED_TYPES = ", ".join((JSON, *_LINES))


async def submit(request: Request, door: JobDoor) -> Response:
    """Accept a job: 202, or the earlier job of the same Idempotency-Key."""
    key, kind = idempotency_key(request.scope), content_type(request.scope)
    if kind != JSON and kind not in _LINES:
        raise wrong_type(f"send Content-Type: {_ACCEPTED_TYPES} (UTF-8)", _ACCEPTED_TYPES)
    with door.uploads.place():
        accepted = await (_submit_json if kind == JSON else _submit_lines)(request, door, key)
    job = accepted.job
    headers = {"Location": f"/v1/jobs/{job.id}"}
    if accepted.replayed:
        headers["Idempotent-Replayed"] = "true"
    return _job(job, 202, headers)


async def _submit_json(request: Request, door: JobDoor, key: str | None) -> Accepted:
    no_query(request.scope["query_string"])
    deadline = deadline_of(request.scope, door.gateway)
    reading = door.bodies.read(request.scope, request.receive, deadline, door.gateway.max_job_json_bytes)
    async with reading as body:
        value = await decode(body, door.gateway.offload_bytes)
        job = parse_body(value, door.settings)
        if job.input_object is not None:
            raise InvalidJob("an imported object is for the topic of jobs; send inputs", field="input_object")
        _check_model(job, door)
        return await _accept(request, door, job, None, key)


async def _submit_lines(request: Request, door: JobDoor, key: str | None) -> Accepted:
    job = parse_query(submit_query(request.scope["query_string"]), door.settings)
    _check_model(job, door)
    body = door.uploads.body(request.scope, request.receive)
    async with aclosing(body):
        return await _accept(request, door, job, body, key)


async def _accept(
    request: Request, door: JobDoor, job: JobRequest, body: AsyncIterator[bytes] | None, key: str | None
) -> Accepted:
    caller = caller_of(request)
    submitter = Submitter(caller.tenant, caller.weight, caller.max_queued_rows)
    return await door.intake.submit(
        job, submitter, body, idempotency_key=key, request_id=request_id_of(request.scope), source=None
    )


def _check_model(job: JobRequest, door: JobDoor) -> None:
    """Raise UnknownModel for a name nobody knows; while Triton is away nobody can say so, and the job is taken."""
    if door.registry.triton_up and job.model not in door.registry.names:
        raise UnknownModel(f"no model named {job.model[:64]!r}")


async def list_jobs(request: Request, door: JobDoor) -> Response:
    """Show a page of jobs, newest first."""
    query = parse_list(request.scope["query_string"])
    async with _in_time(request, door):
        page = await door.ledger.list_jobs(caller_of(request).tenant, query.statuses, query.after, query.limit)
    following = page.jobs[-1].id if page.has_more else None
    data = [job_json(job) for job in page.jobs]
    return _json({"data": data, "has_more": page.has_more, "next": following})


async def get_job(request: Request, door: JobDoor) -> Response:
    """Show a job; ``Prefer: wait=N`` waits for its end."""
    no_query(request.scope["query_string"])
    caller, job_id, asked_s = caller_of(request), _job_id(request), wait_s(request.scope)

    async def get() -> Job:
        return await door.ledger.get(caller.tenant, job_id)

    if asked_s is None or door.waiters.full:
        async with _in_time(request, door):
            return _job(await get())
    seconds = min(asked_s, door.gateway.max_wait_s)
    job = await while_there(request.scope, request.receive, door.waiters.until_ended(get, seconds))
    return _job(job, headers={"Preference-Applied": f"wait={seconds}"})


async def get_results(request: Request, door: JobDoor) -> Response:
    """Stream the results, whole or a range of them."""
    query, tenant, job_id = parse_results(request.scope["query_string"]), caller_of(request).tenant, _job_id(request)
    async with _in_time(request, door):
        job = await door.ledger.get(tenant, job_id)
        if not job.status.ended and not query.partial:
            raise JobNotEnded("the job has not ended; ?partial=true gives what is finished")
        parts = await door.ledger.parts(tenant, job_id)
        try:
            return await results_response(
                request.scope, door.objects, door.downloads, job, parts, only_errors=query.only_errors
            )
        except ObjectMissing as exc:
            await door.ledger.get(tenant, job_id)  # raises UnknownJob where it was deleted a moment ago
            # The ledger still names this part: an operator has to look.
            log.error("results missing", job=job_id, reason=str(exc))
            raise DependencyDown("the results cannot be read") from exc


async def cancel(request: Request, door: JobDoor) -> Response:
    """Begin to cancel: 202 where this call began it, 200 with the job unchanged otherwise."""
    no_query(request.scope["query_string"])
    async with _in_time(request, door):
        job, began = await door.ledger.cancel(caller_of(request).tenant, _job_id(request))
    if began:
        before = Status.QUEUED if job.started_at is None else Status.RUNNING
        log.info(
            "job", job=job.id, from_status=before.value, to_status=job.status.value,
            request_id=request_id_of(request.scope), tenant=job.tenant, model=job.model,
        )  # fmt: skip
    return _job(job, 202 if began else 200)


async def delete(request: Request, door: JobDoor) -> Response:
    """Remove an ended job and its results."""
    no_query(request.scope["query_string"])
    caller, job_id = caller_of(request), _job_id(request)
    async with _in_time(request, door):
        await door.ledger.delete(caller.tenant, job_id)
    log.info("job_deleted", job=job_id, request_id=request_id_of(request.scope), tenant=caller.tenant)
    return Response(status_code=204)


async def bulk_state(request: Request, door: JobDoor) -> Response:
    """Show whether bulk work runs, and every live consumer."""
    async with _admin(request, door):
        return _bulk(await door.ledger.bulk_state(door.settings.consumer_ttl_s))


async def pause(request: Request, door: JobDoor) -> Response:
    """Pause all bulk work."""
    return await _set_paused(request, door, paused=True)


async def resume(request: Request, door: JobDoor) -> Response:
    """Resume all bulk work."""
    return await _set_paused(request, door, paused=False)


async def pinned_models(request: Request, door: JobDoor) -> Response:
    """Tell which versions open jobs have begun on: a model server must keep them loaded."""
    async with _admin(request, door):
        wanted = await door.ledger.wanted()
    pinned = {model: sorted(version for version in versions if version) for model, versions in wanted.items()}
    return _json({"pinned": {model: versions for model, versions in pinned.items() if versions}})


async def _set_paused(request: Request, door: JobDoor, *, paused: bool) -> Response:
    async with _admin(request, door):
        control = await door.ledger.set_paused(paused)
        state = await door.ledger.bulk_state(door.settings.consumer_ttl_s)
    log.info(
        "bulk_paused" if paused else "bulk_resumed",
        epoch=control.epoch, tenant=caller_of(request).tenant, request_id=request_id_of(request.scope),
    )  # fmt: skip
    return _bulk(state)


@asynccontextmanager
async def _admin(request: Request, door: JobDoor) -> AsyncIterator[None]:
    require_admin(request)
    no_query(request.scope["query_string"])
    async with _in_time(request, door):
        yield


@asynccontextmanager
async def _in_time(request: Request, door: JobDoor) -> AsyncIterator[None]:
    """Bound the block by the caller's deadline."""
    deadline = deadline_of(request.scope, door.gateway)
    try:
        async with asyncio.timeout(deadline.remaining_s()):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before there was an answer") from None


def _job_id(request: Request) -> str:
    return check_job_id(request.path_params["job_id"])


def _job(job: Job, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return _json(job_json(job), status, headers)


def _bulk(state: BulkState) -> Response:
    consumers = [
        {
            "id": consumer.id,
            "epoch": consumer.epoch,
            "rows_in_flight": consumer.rows_in_flight,
            "started_at": time_text(consumer.started_at),
            "seen_at": time_text(consumer.seen_at),
        }
        for consumer in state.consumers
    ]
    return _json({"state": state.state, "epoch": state.control.epoch, "consumers": consumers})


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), status, headers, JSON)


def _endpoint(handlers: dict[str, Handler]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        handler, door = handlers["GET" if request.method == "HEAD" else request.method], door_of(request).jobs
        if door is None:  # the ledger is one this code does not know: the process is about to end
            raise DependencyDown("the ledger is not ready")
        try:
            return await handler(request, door)
        except asyncio.CancelledError:
            # Only the server cancels a request: at its stop, for what goes on past TWODOOR_GATEWAY_SHUTDOWN_TIMEOUT_S.
            raise Overloaded("the service is stopping") from None

    return endpoint


_HANDLERS: dict[str, dict[str, Handler]] = {
    "/v1/jobs": {"GET": list_jobs, "POST": submit},
    "/v1/jobs/{job_id}": {"GET": get_job, "DELETE": delete},
    "/v1/jobs/{job_id}/results": {"GET": get_results},
    "/v1/jobs/{job_id}/cancel": {"POST": cancel},
    "/v1/admin/bulk": {"GET": bulk_state},
    "/v1/admin/bulk/pause": {"POST": pause},
    "/v1/admin/bulk/resume": {"POST": resume},
    "/v1/admin/models": {"GET": pinned_models},
}
ROUTES = [Route(path, _endpoint(by), methods=list(by), include_in_schema=False) for path, by in _HANDLERS.items()]


def label_of(path: str) -> str | None:
    """Return the template of a job route's path, for metrics; None for other paths."""
    parts = path.split("/")
    if path.startswith("/v1/jobs/") and len(parts) > 3:
        parts[3] = "{job_id}"
    template = "/".join(parts)
    return template if template in _HANDLERS else None
