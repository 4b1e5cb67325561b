"""A call as it goes over the wire: the request, the answer, and when to try again. No input or output happens here.

One call is a generator that asks its client to send or to wait; the sync and the async client only carry that out.
"""

import json
import random
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from twodoor import errors


@dataclass(frozen=True, slots=True)
class Prediction:
    """One text's answer. A classifier fills ``label``, ``score``, ``scores`` (probability by label), an embedder ``embedding``.

    ``score`` is the probability of ``label``, and where the labels are negative and positive that of positive;
    such a model also fills ``sentiment``.
    """

    label: str | None = None
    score: float | None = None
    scores: Mapping[str, float] | None = None
    sentiment: str | None = None
    embedding: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Predictions:
    """A list's answers in the order of its texts; a text without an answer has its ``RowFailed`` there."""

    model: str
    model_version: str
    rows: tuple[Prediction | errors.RowFailed, ...]
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """How often to come back, and the longest single wait; a longer ``Retry-After`` is left to the caller."""

    retries: int = 2
    max_wait_s: float = 5.0
    first_backoff_s: float = 0.1

    def wait_s(self, error: errors.TwodoorError, tries: int, remaining_s: float) -> float | None:
        """Return how long to wait before the next try, or None where there shall be none."""
        if not error.retriable or tries > self.retries:
            return None
        wanted_s = error.retry_after_s
        if wanted_s is None:
            # Full jitter: callers who failed together do not come back together.
            wanted_s = random.uniform(0.5, 1.0) * self.first_backoff_s * 2 ** (tries - 1)  # noqa: S311
        return wanted_s if wanted_s <= min(self.max_wait_s, remaining_s) else None


@dataclass(frozen=True, slots=True)
class Send:
    """Ask the client to send one request and to hand back the response, or the error it met."""

    path: str
    content: bytes
    headers: Mapping[str, str]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask the client to wait."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError | None
Flow = Generator[Send | Wait, Outcome, Predictions]

# The gateway keeps the deadline it is told; the client gives it this much longer to say so itself (504).
_DEADLINE_GRACE_S = 0.5


def predict_flow(
    texts: Sequence[str], model: str | None, truncate: bool, timeout_s: float, retry: Retry, request_id: str | None
) -> Flow:
    """Ask for the texts' answers; the deadline holds for all tries together."""
    if timeout_s <= 0:
        raise ValueError(f"timeout_s is {timeout_s}, expected a positive number of seconds")
    body: dict[str, Any] = {"text": list(texts)}
    if model is not None:
        body["model"] = model
    if truncate:
        body["truncate"] = True
    # ASCII only: a lone surrogate then travels as an escape and becomes that row's error, not an exception here.
    content = json.dumps(body).encode("ascii")
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    ends = time.monotonic() + timeout_s
    tries = 0
    while True:
        remaining_s = max(ends - time.monotonic(), 0.001)
        headers["X-Timeout-Ms"] = str(max(1, round(remaining_s * 1000)))
        outcome = yield Send("/predict", content, dict(headers), remaining_s + _DEADLINE_GRACE_S)
        tries += 1
        try:
            return read_answer(outcome, len(texts))
        except errors.TwodoorError as error:
            wait_s = retry.wait_s(error, tries, ends - time.monotonic())
            if wait_s is None:
                raise
        yield Wait(wait_s)


def read_answer(outcome: Outcome, rows: int) -> Predictions:
    """Return what a response holds; raises the error it tells of."""
    if not isinstance(outcome, httpx.Response):
        raise _without_answer(outcome)
    request_id = outcome.headers.get("X-Request-Id")
    if outcome.status_code != 200:
        raise _from_problem(outcome, request_id)
    try:
        body = outcome.json()
        parsed = tuple(_row(row, request_id) for row in body["predictions"])
        answer = Predictions(str(body["model"]), str(body["model_version"]), parsed, request_id)
    except (ValueError, KeyError, TypeError) as exc:
        raise _bad_answer("the answer is not in Twodoor's form", outcome, request_id) from exc
    if len(parsed) != rows:
        raise _bad_answer(f"{len(parsed)} answers for {rows} texts", outcome, request_id)
    return answer


def only_row(answer: Predictions) -> Prediction:
    """Return the answer of a call with one text; raises that text's error."""
    row = answer.rows[0]
    if isinstance(row, errors.RowFailed):
        raise row
    return row


def _row(row: Mapping[str, Any], request_id: str | None) -> Prediction | errors.RowFailed:
    if "error" in row:
        problem = row["error"]
        return errors.RowFailed(str(problem["message"]), code=str(problem["code"]), request_id=request_id)
    if "embedding" in row:
        return Prediction(embedding=[float(value) for value in row["embedding"]])
    scores = {str(label): float(score) for label, score in row["scores"].items()}
    return Prediction(str(row["label"]), float(row["score"]), scores, row.get("sentiment"))


def _without_answer(error: httpx.RequestError | None) -> errors.TwodoorError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return errors.NotReachable(f"nobody answers at {_address(error)}", code="not_reachable")
    if isinstance(error, httpx.TimeoutException):
        return errors.DeadlineExceeded("no answer within the deadline", code="deadline_exceeded")
    return errors.ConnectionLost("the connection broke before the answer", code="connection_lost")


def _address(error: httpx.RequestError) -> str:
    url = error.request.url
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def _from_problem(response: httpx.Response, request_id: str | None) -> errors.TwodoorError:
    status = response.status_code
    try:
        problem = response.json()
        code, message = str(problem["code"]), str(problem.get("detail") or problem.get("title") or problem["code"])
    except (ValueError, KeyError, TypeError, AttributeError):
        # A proxy's page, or another program: the status still says what kind of trouble it is.
        code, message = f"http_{status}", f"HTTP {status}"
    wait_s = _retry_after_s(response.headers.get("Retry-After"))
    return errors.class_for(status, code)(
        message, code=code, status=status, retry_after_s=wait_s, request_id=request_id
    )


def _bad_answer(message: str, response: httpx.Response, request_id: str | None) -> errors.BadAnswer:
    return errors.BadAnswer(message, code="bad_answer", status=response.status_code, request_id=request_id)


def _retry_after_s(value: str | None) -> float | None:
    """Read Retry-After (RFC 9110 section 10.2.3): seconds, or a date; None where it is neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
