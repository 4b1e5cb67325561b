"""The routes: parse, call, render."""

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from gateway.answers import JSON, answer
from gateway.body import BodyReader, check_json_type, has_body
from gateway.envelope import exchange_of, header
from gateway.forms import Call, missing_text, parse_body, parse_query
from gateway.job_door import JobDoor
from gateway.keys import caller_of
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.openapi import PREDICT, docs_page
from gateway.predict import Predictor
from gateway.problems import CallerGone, Problem, problem_of
from gateway.ratelimit import RateLimits
from serving.codec import decode_json, encode_json
from serving.deadline import Deadline
from serving.errors import InvalidJson, InvalidUnicode, Overloaded
from serving.registry import Registry
from serving.settings import GatewaySettings

T = TypeVar("T")
router = APIRouter()
_TIMEOUT_MS = re.compile(rb"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Door:
    """What the routes need; made by the lifespan and found in ``request.state.door``."""

    settings: GatewaySettings
    registry: Registry
    predictor: Predictor
    bodies: BodyReader
    limits: RateLimits
    metrics: Metrics
    jobs: JobDoor | None = None
    """None where this installation keeps no jobs."""


def door_of(request: Request) -> Door:
    """Return the open door of this app."""
    return cast("Door", request.state.door)


@router.post("/predict", openapi_extra=PREDICT, summary="Classify or embed one text or a list of texts")
async def predict(request: Request) -> Response:
    """Answer one text, or a list of texts row by row."""
    door = door_of(request)
    scope, receive = request.scope, request.receive
    deadline = deadline_of(scope, door.settings)
    if has_body(scope) and not scope["query_string"]:
        check_json_type(scope)
    try:
        async with door.bodies.read(scope, receive, deadline) as body:
            call = await _call(door.settings, scope, body)
            await door.limits.take(caller_of(request), len(call.texts))
            model, outcomes = await while_connected(receive, door.predictor.run(call, deadline))
            return await answer(door.settings, call, model.spec, outcomes)
    except asyncio.CancelledError:
        # Only the server cancels a request: at its stop, for what goes on past TWODOOR_GATEWAY_SHUTDOWN_TIMEOUT_S.
        raise Overloaded("the service is stopping") from None


async def healthz(request: Request) -> Response:
    """Say that the process is alive."""
    return Response(b'{"status":"ok"}', media_type=JSON)


async def readyz(request: Request) -> Response:
    """Say that the process takes requests; a part that is away is told, and does not make this fail."""
    door = door_of(request)
    up = {"triton": door.registry.triton_up} | (door.jobs.health.up if door.jobs is not None else {})
    return Response(
        encode_json({"dependencies": {name: "up" if is_up else "down" for name, is_up in up.items()}}), media_type=JSON
    )


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(door_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def docs(request: Request) -> Response:
    """Return a page about the routes that needs nothing from elsewhere."""
    return Response(docs_page(door_of(request).jobs is not None), media_type="text/html; charset=utf-8")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; a caller who leaves ends the work, and CallerGone is raised."""
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise CallerGone from None
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


def deadline_of(scope: Scope, settings: GatewaySettings) -> Deadline:
    """Return the caller's deadline: it started when the request's head was read."""
    given = header(scope, b"x-timeout-ms")
    timeout_ms = settings.default_timeout_ms
    if given is not None:
        if not _TIMEOUT_MS.fullmatch(given) or int(given) < 1:
            raise Problem(
                422,
                "invalid_request",
                "X-Timeout-Ms must be a whole number of milliseconds, at least 1",
                field="header X-Timeout-Ms",
                limit=settings.max_timeout_ms,
            )
        timeout_ms = min(int(given), settings.max_timeout_ms)
    return Deadline(exchange_of(scope).started_s + timeout_ms / 1000)


async def _call(settings: GatewaySettings, scope: Scope, body: bytearray) -> Call:
    call = parse_query(scope["query_string"])
    if call is not None:
        if body:
            raise Problem(422, "invalid_request", "the text is in the query, so there may be no body", field="body")
        return call
    if not body:
        raise missing_text()
    return parse_body(await decode_body(body, settings.offload_bytes), settings.max_rows)


async def decode_body(body: bytearray, offload_bytes: int) -> Any:
    """Return a JSON body's value, a large one parsed in a thread; raises Problem 422."""
    try:
        if len(body) > offload_bytes:
            return await asyncio.to_thread(decode_json, body)
        return decode_json(body)
    except (InvalidJson, InvalidUnicode) as exc:
        raise problem_of(exc, field="body") from exc
