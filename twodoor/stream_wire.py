"""A stream as it goes over the wire: what was handed over, what is unanswered, what is sent again. No input or output here."""

import heapq
import itertools
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus, WebSocketException

from twodoor import errors
from twodoor.transport import Core
from twodoor.wire import Patience, Prediction, Retry, from_problem, positive, row_of

StreamItem = str | Mapping[str, Any]
"""A text, or ``{"text", "id"?, "model"?, "truncate"?}``."""

MOST_UNANSWERED = 1_024
_FIELDS = {"id", "text", "model", "truncate"}
# A close with one of these would come again: it says that something we sent is wrong.
_REFUSALS = frozenset({1002, 1003, 1007, 1008, 1009})
_BY_CODE: dict[str, type[errors.TwodoorError]] = {
    "overloaded": errors.Unavailable,
    "dependency_down": errors.Unavailable,
    "rate_limited": errors.RateLimited,
    "deadline_exceeded": errors.DeadlineExceeded,
    "unknown_model": errors.UnknownModel,
    "invalid_request": errors.Invalid,
    "internal_error": errors.ServerFailed,
}
_OWN_HEADERS = frozenset({"accept", "accept-encoding", "connection", "host"})
_MOST_ANSWER_BYTES = 16 * 2**20
_OPEN_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0
_PING_TIMEOUT_S = 20.0
# The gateway keeps each message's deadline; the client waits this much longer for it to say so.
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """One text's answer: ``index`` counts the texts handed over from 0, ``id`` is the caller's own.

    ``answer`` is the prediction, or the error of a text without one: RowFailed where the text is at fault, Unavailable,
    RateLimited or DeadlineExceeded where asking again may help.
    """

    index: int
    id: str | None
    answer: Prediction | errors.TwodoorError
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(slots=True)
class _Sent:
    index: int
    id: str | None
    content: str
    tries: int = 0


class Window:
    """The texts handed over and not yet given back as answers: at most ``most`` of them, so memory is bounded.

    Predictions change nothing, so what is unanswered when a connection breaks is simply sent again on the next; a text
    that the server turned away for the moment is sent again when it said, as often as ``retry`` allows. The server may
    owe an answer for ``timeout_s`` and a little; where it owes none, nobody counts how long it says nothing.
    """

    def __init__(
        self, most: int, model: str | None, truncate: bool, retry: Retry, timeout_s: float, *, in_order: bool
    ) -> None:
        if not 1 <= most <= MOST_UNANSWERED:
            raise ValueError(f"window is {most}, expected 1 to {MOST_UNANSWERED}")
        self._most, self._retry, self._in_order = most, retry, in_order
        self._most_silent_s = positive(timeout_s) + _GRACE_S
        self._silent_since_s = time.monotonic()
        given = {"model": model, "truncate": truncate or None}
        self._common = {name: value for name, value in given.items() if value is not None}
        self._numbers = itertools.count()
        self._pending: dict[int, _Sent] = {}
        self._unsent: deque[int] = deque()
        self._later: list[tuple[float, int]] = []
        self._held: dict[int, StreamAnswer] = {}
        self._next_index = 0
        self._ready: deque[StreamAnswer] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more text may be handed over."""
        return len(self._pending) + len(self._held) + len(self._ready) < self._most

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._pending)

    def add(self, item: StreamItem) -> None:
        """Hand a text over; raises ValueError for what is none."""
        given = {"text": item} if isinstance(item, str) else dict(item)
        if not isinstance(given.get("text"), str) or not set(given) <= _FIELDS:
            raise ValueError('an item is a text, or {"text", "id"?, "model"?, "truncate"?}')
        own_id = given.pop("id", None)
        index = next(self._numbers)
        # The id on the wire is ours: the caller's own may come twice.
        self._pending[index] = _Sent(index, own_id, encode_message({"id": str(index), **self._common, **given}))
        self._unsent.append(index)

    def unsent(self) -> Iterator[str]:
        """Yield the messages that are to be sent now; each counts as sent when the next is asked for."""
        now_s = time.monotonic()
        while self._later and self._later[0][0] <= now_s:
            self._unsent.append(heapq.heappop(self._later)[1])
        while self._unsent:
            sent = self._pending.get(self._unsent[0])
            if sent is not None:
                if len(self._pending) <= len(self._unsent) + len(self._later):  # no answer was owed until now
                    self._silent_since_s = time.monotonic()
                yield sent.content
            if self._unsent:  # a connection lost in between fills it anew
                self._unsent.popleft()

    def lost(self) -> None:
        """Send everything unanswered again: the connection is gone."""
        waiting = {index for _, index in self._later}
        self._unsent = deque(index for index in self._pending if index not in waiting)

    def wait_s(self, most_s: float) -> float:
        """Return how long to wait for an answer before `unsent` is asked again."""
        return max(0.0, min(most_s, self._later[0][0] - time.monotonic())) if self._later else most_s

    def check_silence(self) -> None:
        """Raise ConnectionLost where the server has said nothing for longer than an answer that it owes may take."""
        owes = len(self._pending) > len(self._unsent) + len(self._later)
        if owes and time.monotonic() - self._silent_since_s > self._most_silent_s:
            raise errors.ConnectionLost("the server has fallen silent", code="connection_lost")

    def received(self, content: str | bytes) -> None:
        """Take a message of the server; raises BadAnswer for what is none."""
        self._silent_since_s = time.monotonic()
        try:
            message = json.loads(content)
            sent = self._pending.get(int(message["id"]))
            answer = _answer(message)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise errors.BadAnswer("a message is not in Twodoor's form", code="bad_answer") from exc
        if sent is None:
            return  # answered on an earlier connection too
        if isinstance(answer, errors.TwodoorError) and self._try_again(sent, answer):
            return
        del self._pending[sent.index]
        self._finish(StreamAnswer(sent.index, sent.id, answer, message))

    def take(self) -> StreamAnswer | None:
        """Return an answer that may be given back, or None."""
        return self._ready.popleft() if self._ready else None

    def taken(self) -> Iterator[StreamAnswer]:
        """Yield all answers that may be given back."""
        while (answer := self.take()) is not None:
            yield answer

    def _try_again(self, sent: _Sent, error: errors.TwodoorError) -> bool:
        sent.tries += 1
        wait_s = self._retry.wait_s(error, sent.tries, float("inf"))
        if wait_s is None:
            return False
        heapq.heappush(self._later, (time.monotonic() + wait_s, sent.index))
        return True

    def _finish(self, answer: StreamAnswer) -> None:
        if not self._in_order:
            self._ready.append(answer)
            return
        self._held[answer.index] = answer
        while self._next_index in self._held:
            self._ready.append(self._held.pop(self._next_index))
            self._next_index += 1


class Outage:
    """How long to stay with a server that is away: up to ``outage_s`` since it went.

    A stream may rest for hours before that: its caller asks for nothing, or takes its time over an answer.
    """

    def __init__(self, outage_s: float) -> None:
        self._patience = Patience(outage_s)
        self._is_away, self._was_there = True, False

    def opened(self) -> None:
        """Say that there is a connection. Only an answer ends an outage, but for the first connection of all."""
        if not self._was_there:
            self.over()

    def over(self) -> None:
        """Say that an answer came."""
        self._patience.came()
        self._is_away, self._was_there = False, True

    def pause_s(self, error: errors.TwodoorError) -> float | None:
        """Return how long to wait before the next try, or None where there shall be none."""
        if not self._is_away:
            self._patience.came()
            self._is_away = True
        return self._patience.pause_s(error)


def options(core: Core, headers: Mapping[str, str], timeout_s: float, window: int) -> dict[str, Any]:
    """Return how to open the connection, for the sync and the async client of `websockets`.

    Every answer that can be due fits the library's queue, so nobody who still sends keeps the server from answering.
    """
    own = {name: value for name, value in headers.items() if name.lower() not in _OWN_HEADERS}
    user_agent = own.pop("user-agent", None)
    return {
        "uri": f"ws{core.url.removeprefix('http')}/v1/stream",
        "additional_headers": {**own, "X-Timeout-Ms": str(max(1, round(positive(timeout_s) * 1000)))},
        "user_agent_header": user_agent,
        "compression": None,
        "proxy": None if core.is_loopback else True,
        "open_timeout": _OPEN_TIMEOUT_S,
        # A pong waits behind texts that the server does not read while it owes as many answers as it takes on.
        "ping_timeout": max(_PING_TIMEOUT_S, timeout_s + _GRACE_S),
        "close_timeout": _CLOSE_TIMEOUT_S,
        "max_size": _MOST_ANSWER_BYTES,
        "max_queue": window + 1,
    }


@contextmanager
def translated(core: Core) -> Iterator[None]:
    """Raise the tree's errors for what a connection meets."""
    try:
        yield
    except InvalidStatus as exc:
        given = exc.response
        headers = list(given.headers.raw_items())
        raise from_problem(
            httpx.Response(given.status_code, headers=headers, content=bytes(given.body or b""))
        ) from exc
    except ConnectionClosed as exc:
        raise _closed(exc) from exc
    except (InvalidMessage, EOFError) as exc:
        raise errors.ConnectionLost("the connection broke before the stream was open", code="connection_lost") from exc
    except WebSocketException as exc:
        raise errors.BadAnswer("the server does not open a WebSocket", code="bad_answer") from exc
    except OSError as exc:
        raise errors.NotReachable(f"nobody answers at {core.url}", code="not_reachable") from exc


def _closed(exc: ConnectionClosed) -> errors.TwodoorError:
    close = exc.rcvd
    if close is not None and close.code in _REFUSALS:
        return errors.Refused(f"the server closed the stream: {close.reason} ({close.code})", code="stream_closed")
    return errors.ConnectionLost("the connection broke before the answer", code="connection_lost")


def _answer(message: Mapping[str, Any]) -> Prediction | errors.TwodoorError:
    problem = message.get("error")
    if problem is None:
        return row_of(message["output"])
    code = str(problem["code"])
    retry_after_s = problem.get("retry_after_s")
    return _BY_CODE.get(code, errors.RowFailed)(
        str(problem["message"]), code=code, retry_after_s=None if retry_after_s is None else float(retry_after_s)
    )


def encode_message(message: Mapping[str, Any]) -> str:
    """Write UTF-8 as it is; a lone surrogate travels as an escape and becomes that text's error."""
    text = json.dumps(message, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(message)
    return text
