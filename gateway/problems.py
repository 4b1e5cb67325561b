"""The one table that renders errors as RFC 9457 problems, and the handlers that put it to work.

A problem always has ``type``, ``title``, ``status``, ``detail``, ``code`` and ``request_id``; where they apply also
``field`` (``text[1]``, ``header X-Timeout-Ms``), ``row``, ``limit`` and ``retry_after_s``.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus

import structlog
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.envelope import request_id_of
from gateway.metrics import Metrics
from serving.codec import encode_json
from serving.errors import (
    DeadlineExceeded,
    DependencyDown,
    EmptyInput,
    IdempotencyMismatch,
    InvalidJob,
    JobNotEnded,
    NonFiniteOutput,
    Overloaded,
    QuotaError,
    RowError,
    TwodoorError,
    UnknownJob,
    UnknownModel,
)

log = structlog.get_logger(__name__)

PROBLEM_JSON = "application/problem+json"
CALLER_GONE = 499

# First match by class, the most special first. A row error of a single-text call is 422; the model's own fault 502.
_STATUS: tuple[tuple[type[TwodoorError], int], ...] = (
    (UnknownModel, 404),
    (NonFiniteOutput, 502),
    (RowError, 422),
    (UnknownJob, 404),
    (JobNotEnded, 409),
    (EmptyInput, 422),
    (InvalidJob, 422),
    (IdempotencyMismatch, 422),
    (QuotaError, 429),
    (Overloaded, 503),
    (DependencyDown, 503),
    (DeadlineExceeded, 504),
)
_FRAMEWORK_CODES = {404: "not_found", 405: "method_not_allowed"}


class Problem(Exception):
    """An answer that ends a request: what was wrong, where, and which limit it broke."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        row: int | None = None,
        limit: float | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail
        self.field, self.row, self.limit = field, row, limit
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})


class CallerGone(Exception):
    """The caller closed the connection: there is nobody to answer."""


def problem_of(error: TwodoorError, *, field: str | None = None, limit: float | None = None) -> Problem:
    """Return the problem that says what the core raised."""
    status = next((status for cls, status in _STATUS if isinstance(error, cls)), 500)
    if status == 500:
        return _bug()
    retry_after_s = error.retry_after_s if isinstance(error, (QuotaError, Overloaded, DependencyDown)) else None
    if isinstance(error, UnknownModel):
        field = "model"
    elif isinstance(error, InvalidJob):
        field, limit = error.field, error.limit
    elif isinstance(error, QuotaError):
        limit = error.limit
    return Problem(status, error.code, str(error), field=field, limit=limit, retry_after_s=retry_after_s)


def render(problem: Problem, request_id: str) -> Response:
    """Return the response of a problem."""
    body: dict[str, object] = {
        "type": "about:blank",
        "title": _title(problem.status),
        "status": problem.status,
        "detail": printable(problem.detail),
        "code": problem.code,
        "request_id": request_id,
    }
    places = {"field": problem.field, "row": problem.row, "limit": problem.limit}
    body |= {name: value for name, value in places.items() if value is not None}
    headers = dict(problem.headers)
    if problem.retry_after_s is not None:
        body["retry_after_s"] = round(problem.retry_after_s, 3)
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    return Response(encode_json(body), problem.status, headers, PROBLEM_JSON)


def printable(text: str) -> str:
    """Return text that may stand in JSON and in a log whatever a caller sent: a lone surrogate becomes its escape."""
    return text.encode(errors="backslashreplace").decode()


def install(app: FastAPI, metrics: Metrics) -> None:
    """Register the handlers, so that everything the app raises leaves as a problem."""

    async def on_error(request: Request, exc: Exception) -> Response:
        return respond(exc, request.scope, metrics)

    # The last one also lets the server log the traceback: it is a bug of ours.
    for cls in (Problem, CallerGone, TwodoorError, HTTPException, Exception):
        app.add_exception_handler(cls, on_error)


def respond(exc: Exception, scope: Scope, metrics: Metrics) -> Response:
    """Return the response of whatever a route raised, and count what was refused or dropped."""
    if isinstance(exc, CallerGone):
        metrics.shed.labels("caller_gone").inc()
        return Response(status_code=CALLER_GONE)
    if isinstance(exc, QuotaError):
        metrics.shed.labels(exc.code).inc()
    return render(_any_problem(exc), request_id_of(scope))


def _any_problem(exc: Exception) -> Problem:
    if isinstance(exc, Problem):
        return exc
    if isinstance(exc, TwodoorError):
        return problem_of(exc)
    if isinstance(exc, HTTPException):
        code = _FRAMEWORK_CODES.get(exc.status_code, "invalid_request")
        detail = "no such route" if exc.status_code == 404 else str(exc.detail)
        return Problem(exc.status_code, code, detail, headers=exc.headers)
    return _bug()


def _bug() -> Problem:
    return Problem(500, "internal_error", "the service failed; the log has the reason")


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
