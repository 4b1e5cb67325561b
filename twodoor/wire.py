"""A call as it goes over the wire: the request, the answer, and when to try again. No input or output happens here.

One call is a generator that asks its client to send, to read or to wait; the sync and the async client only carry
that out (transport.py). Here are the steps, the rules of trying again, the errors, and the flow of `/predict`.
"""

import json
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, Protocol, TypeVar

import httpx

from twodoor import errors

T = TypeVar("T")

_NOBODY_S = 1.0


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


class Body(Protocol):
    """What a call sends where that is too large to hold: it can be read again for another try."""

    def pieces(self) -> Iterator[bytes]:
        """Yield it from its beginning."""
        ...


class Patience:
    """How long to stay with work that goes on without its server: up to ``outage_s`` since something came.

    Where nobody has answered at all yet, there may be no server: that is told after a second.
    """

    def __init__(self, outage_s: float) -> None:
        self._outage_s = outage_s
        self._came_at, self._tries, self._met = time.monotonic(), 0, False

    def came(self) -> None:
        """Say that the server gave something."""
        self._came_at, self._tries, self._met = time.monotonic(), 0, True

    def pause_s(self, error: errors.TwodoorError, ends: float = float("inf")) -> float | None:
        """Return how long to wait before the next try, or None where there shall be none (``ends`` is a monotonic time)."""
        passing = errors.NotReachable | errors.Unavailable | errors.DeadlineExceeded | errors.RateLimited
        if not isinstance(error, passing):
            return None
        self._tries += 1
        self._met = self._met or type(error) is not errors.NotReachable
        patience_s = self._outage_s if self._met else min(self._outage_s, _NOBODY_S)
        pause_s = max(error.retry_after_s or 0.0, min(2.0, 0.05 * 2**self._tries))
        return pause_s if time.monotonic() + pause_s <= min(self._came_at + patience_s, ends) else None


@dataclass(frozen=True, slots=True)
class Send:
    """Ask the client to send one request and to hand back the response, or the error it met.

    ``timeout_s`` bounds the whole exchange; with a `Body`, and where the answer is ``streamed``, each single read and
    write. A streamed answer that is a success is handed back unread: `Read` asks for its pieces.
    """

    path: str
    content: bytes | Body
    headers: Mapping[str, str]
    timeout_s: float
    method: str = "POST"
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Ask the client for the next piece of the streamed answer: empty at its end, or the error it met."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask the client to wait."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Emit(Generic[T]):
    """Ask the client to hand an item over to whoever iterates."""

    item: T


Step = Send | Read | Wait | Emit[Any]
Outcome = httpx.Response | httpx.RequestError | bytes | None
Flow = Generator[Step, Outcome, T]

# The gateway keeps the deadline it is told; the client gives it this much longer to say so itself (504).
_DEADLINE_GRACE_S = 0.5


def tried(send: Callable[[float], Send], read: Callable[[Outcome], T], timeout_s: float, retry: Retry) -> Flow[T]:
    """Ask until there is an answer: ``send`` makes a request from the seconds that are left, ``read`` its result."""
    ends = time.monotonic() + timeout_s
    tries = 0
    while True:
        outcome = yield send(max(ends - time.monotonic(), 0.001))
        tries += 1
        try:
            return read(outcome)
        except errors.TwodoorError as error:
            wait_s = retry.wait_s(error, tries, ends - time.monotonic())
            if wait_s is None:
                raise
        yield Wait(wait_s)


def positive(timeout_s: float) -> float:
    """Return a timeout that is one; raises ValueError."""
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}, expected a positive number of seconds")
    return timeout_s


def predict_flow(
    texts: Sequence[str], model: str | None, truncate: bool, timeout_s: float, retry: Retry, request_id: str | None
) -> Flow[Predictions]:
    """Ask for the texts' answers; the deadline holds for all tries together."""
    positive(timeout_s)
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

    def send(left_s: float) -> Send:
        told = {**headers, "X-Timeout-Ms": str(max(1, round(left_s * 1000)))}
        return Send("/predict", content, told, left_s + _DEADLINE_GRACE_S)

    return (yield from tried(send, lambda outcome: read_answer(outcome, len(texts)), timeout_s, retry))


def read_answer(outcome: Outcome, rows: int) -> Predictions:
    """Return what a response holds; raises the error it tells of."""
    response = success(outcome)
    request_id = response.headers.get("X-Request-Id")
    try:
        body = response.json()
        parsed = tuple(row_of(row, request_id) for row in body["predictions"])
        answer = Predictions(str(body["model"]), str(body["model_version"]), parsed, request_id)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise bad_answer(response) from exc
    if len(parsed) != rows:
        raise bad_answer(response, f"{len(parsed)} answers for {rows} texts")
    return answer


def success(outcome: Outcome, *statuses: int) -> httpx.Response:
    """Return a response with one of the statuses (default: 200); raises the error of any other outcome."""
    if not isinstance(outcome, httpx.Response):
        raise without_answer(outcome)
    if outcome.status_code not in (statuses or (200,)):
        raise from_problem(outcome)
    return outcome


def only_row(answer: Predictions) -> Prediction:
    """Return the answer of a call with one text; raises that text's error."""
    row = answer.rows[0]
    if isinstance(row, errors.RowFailed):
        raise row
    return row


def row_of(row: Mapping[str, Any], request_id: str | None = None) -> Prediction | errors.RowFailed:
    """Return one row's answer or error; raises ValueError, KeyError, TypeError or AttributeError where it is neither."""
    if "error" in row:
        problem = row["error"]
        return errors.RowFailed(str(problem["message"]), code=str(problem["code"]), request_id=request_id)
    if "embedding" in row:
        return Prediction(embedding=[float(value) for value in row["embedding"]])
    scores = {str(label): float(score) for label, score in row["scores"].items()}
    return Prediction(str(row["label"]), float(row["score"]), scores, row.get("sentiment"))


def without_answer(outcome: Outcome) -> errors.TwodoorError:
    """Return the error of an exchange that gave no response."""
    if isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout):
        return errors.NotReachable(f"nobody answers at {_address(outcome)}", code="not_reachable")
    if isinstance(outcome, httpx.TimeoutException):
        return errors.DeadlineExceeded("no answer within the deadline", code="deadline_exceeded")
    return errors.ConnectionLost("the connection broke before the answer", code="connection_lost")


def _address(error: httpx.RequestError) -> str:
    url = error.request.url
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def from_problem(response: httpx.Response) -> errors.TwodoorError:
    """Return the error that a response which is no success tells of."""
    status = response.status_code
    try:
        problem = response.json()
        code, message = str(problem["code"]), str(problem.get("detail") or problem.get("title") or problem["code"])
    except (ValueError, KeyError, TypeError, AttributeError):
        # A proxy's page, or another program: the status still says what kind of trouble it is.
        code, message = f"http_{status}", f"HTTP {status}"
    return errors.class_for(status, code)(
        message,
        code=code,
        status=status,
        retry_after_s=_retry_after_s(response.headers.get("Retry-After")),
        request_id=response.headers.get("X-Request-Id"),
    )


def bad_answer(response: httpx.Response, why: str = "the answer is not in Twodoor's form") -> errors.BadAnswer:
    """Return the error for an answer that cannot be Twodoor's."""
    request_id = response.headers.get("X-Request-Id")
    return errors.BadAnswer(why, code="bad_answer", status=response.status_code, request_id=request_id)


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
