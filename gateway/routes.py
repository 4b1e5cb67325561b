"""The routes: parse, call, render."""

import asyncio
import re
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from gateway.answers import JSON, answer
from gateway.body import BodyReader, check_json_type, has_body
from gateway.caller import while_there
from gateway.envelope import exchange_of, header
from gateway.forms import Call, missing_text, parse_body, parse_query
from gateway.job_door import JobDoor
from gateway.keys import caller_in
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.openapi import PREDICT, docs_page
from gateway.predict import Predictor
from gateway.problems import Problem, problem_of
from gateway.ratelimit import RateLimits
from serving.codec import decode_json, encode_json
from serving.deadline import Deadline
from serving.errors import InvalidJson, InvalidUnicode, Overloaded
from serving.registry import Registry
from serving.settings import GatewaySettings

PREDICT_PATH = "/predict"
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

    def dependencies(self) -> dict[str, bool]:
        """Return whether each part that this process uses is there, as it last saw it."""
        return {"triton": self.registry.triton_up} | (self.jobs.health.up if self.jobs is not None else {})


def door_of(request: Request) -> Door:
    """Return the open door of this app."""
    return cast("Door", request.state.door)


@router.post(PREDICT_PATH, openapi_extra=PREDICT, summary="Classify or embed one text or a list of texts")
async def predict(request: Request) -> Response:
    """Answer one text, or a list of texts row by row."""
    return Response(await predict_content(request.scope, request.receive), media_type=JSON)


async def predict_content(scope: Scope, receive: Receive) -> bytes:
    """Return the JSON that answers a call of ``POST /predict``."""
    door: Door = scope["state"]["door"]
    deadline = deadline_of(scope, door.settings)
    if has_body(scope) and not scope["query_string"]:
        check_json_type(scope)
    try:
        async with door.bodies.read(scope, receive, deadline) as body:
            call = await _call(door.settings, scope, body)
            await door.limits.take(caller_in(scope), len(call.texts))
            model, outcomes = await while_there(scope, receive, door.predictor.run(call, deadline))
            return await answer(door.settings, call, model.spec, outcomes)
    except asyncio.CancelledError:
        # Only the server cancels a request: at its stop, for what goes on past TWODOOR_GATEWAY_SHUTDOWN_TIMEOUT_S.
        raise Overloaded("the service is stopping") from None


async def healthz(request: Request) -> Response:
    """Say that the process is alive."""
    return Response(b'{"status":"ok"}', media_type=JSON)


async def readyz(request: Request) -> Response:
    """Say that the process takes requests; a part that is away is told, and does not make this fail."""
    states = {name: "up" if is_up else "down" for name, is_up in door_of(request).dependencies().items()}
    return Response(encode_json({"dependencies": states}), media_type=JSON)


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(door_of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def docs(request: Request) -> Response:
    """Return a page about the routes that needs nothing from elsewhere."""
    return Response(docs_page(door_of(request).jobs is not None), media_type="text/html; charset=utf-8")


def deadline_of(scope: Scope, settings: GatewaySettings) -> Deadline:
    """Return the caller's deadline: it started when the request's head was read."""
    return Deadline(exchange_of(scope).started_s + timeout_ms_of(scope, settings) / 1000)


def timeout_ms_of(scope: Scope, settings: GatewaySettings) -> int:
    """Return how long the caller waits for an answer; raises Problem 422."""
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
    return timeout_ms


async def _call(settings: GatewaySettings, scope: Scope, body: bytearray) -> Call:
    call = parse_query(scope["query_string"])
    if call is not None:
        if body:
            raise Problem(422, "invalid_request", "the text is in the query, so there may be no body", field="body")
        return call
    if not body:
        raise missing_text()
    return parse_body(await decode(body, settings.offload_bytes), settings.max_rows)


async def decode(content: bytes | bytearray, offload_bytes: int, field: str = "body") -> Any:
    """Return the JSON value of a body or a message, a large one parsed in a thread; raises Problem 422 that names ``field``."""
    try:
        if len(content) > offload_bytes:
            return await asyncio.to_thread(decode_json, content)
        return decode_json(content)
    except (InvalidJson, InvalidUnicode) as exc:
        raise problem_of(exc, field=field) from exc
