"""Rows of concurrent calls go to a model together: neighbours in length, while other requests are on their way.

Triton batches only requests of one shape, so calls of one text each would hardly share a run. Nothing waits for a
timer: a row goes out at once while fewer requests are at the model than keep its instances busy, and when one comes
back the next is made of the rows that wait. A call keeps its place in line and one turn at a time, so that a long list
holds up nobody.
"""

import asyncio
import contextvars
import copy
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog
from opentelemetry.trace import SpanKind

from gateway.admission import Lease
from gateway.join_plan import JoinBounds, neighbours
from serving.deadline import Deadline
from serving.errors import DeadlineExceeded, DependencyDown, ModelFailed, ModelRefused, RowError, TwodoorError
from serving.pipeline import Pipeline
from serving.postprocess import Answer
from serving.preprocess import Encoded
from serving.registry import Model
from serving.settings import GatewaySettings
from serving.telemetry import inject_headers, span

log = structlog.get_logger(__name__)

Outcome = Answer | RowError
_CLOSE_TIMEOUT_S = 5.0
_STOPPING = DependencyDown("the service is stopping")


class Waiting:
    """One call's rows in line. ``done`` is set once: with all outcomes, or with what ended the call."""

    __slots__ = ("_left", "context", "deadline", "done", "lease", "outcomes", "requests", "rows")

    def __init__(
        self, encoded: Sequence[Encoded | RowError], deadline: Deadline, lease: Lease, done: "asyncio.Future[None]"
    ) -> None:
        self.deadline, self.lease, self.done = deadline, lease, done
        self.outcomes: list[Outcome | None] = [row if isinstance(row, RowError) else None for row in encoded]
        self.rows = deque(_Row(self, place, row) for place, row in enumerate(encoded) if isinstance(row, Encoded))
        self.requests: list[_Request] = []
        self.context = contextvars.copy_context()
        self._left = len(self.rows)

    def settle(self, place: int, outcome: Outcome) -> None:
        """Note a row's outcome; the last one ends the call."""
        self.outcomes[place] = outcome
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the call with an error of its own."""
        if not self.done.done():
            # One error raised in many tasks would collect the traceback of each.
            self.done.set_exception(copy.copy(error) if isinstance(error, TwodoorError) else error)

    def expire(self) -> None:
        """End the call at its deadline."""
        self.fail(DeadlineExceeded("the deadline passed before there was an answer"))


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    call: Waiting
    place: int
    encoded: Encoded


class _Request:
    """Rows that are at the model together. It holds a place there, and the tokens of its calls, until Triton is done."""

    def __init__(self, rows: Sequence[_Row], freed: Callable[[], None]) -> None:
        self.rows = rows
        self.calls = list(dict.fromkeys(row.call for row in rows))
        self.task: asyncio.Task[None] | None = None
        self._freed = freed
        # The task, and what it has sent: an answer that nobody waits for comes later than the task's end.
        self._holders = 1
        self._left = False
        for call in self.calls:
            call.lease.hold()
            call.requests.append(self)

    def hold(self) -> None:
        """Count in what the task sends."""
        self._holders += 1

    def leave(self, task: "asyncio.Task[None] | None" = None) -> None:
        """Count the task out, once. One that was cancelled may never have begun: its calls are told here."""
        if task is not None and task.cancelled():
            self.fail(_STOPPING)
        if not self._left:
            self._left = True
            self.drop()

    def drop(self) -> None:
        """Count one holder out; the last one frees the place."""
        self._holders -= 1
        if not self._holders:
            for call in self.calls:
                call.lease.drop()
            self._freed()

    def fail(self, error: BaseException) -> None:
        """End every call that has a row in it."""
        for call in self.calls:
            call.fail(error)

    def cancel_if_abandoned(self) -> None:
        """End the task when nobody waits for any of its rows."""
        if self.task is not None and all(call.done.done() for call in self.calls):
            self.task.cancel()


class Joiner:
    """The line before one model version."""

    def __init__(self, pipeline: Pipeline, model: Model, settings: GatewaySettings) -> None:
        self.model = model
        self._pipeline = pipeline
        self._bounds = JoinBounds(
            min(settings.max_request_rows, model.spec.max_batch_rows),
            settings.max_request_tokens,
            settings.request_overhead_tokens,
        )
        # One request more than there are instances: none of them idles while an answer is on its way back.
        self._most = settings.max_in_flight or model.spec.instances + 1
        # In the order of their turns. As long as admission lets it be: every row in it has tokens admitted.
        self._line: OrderedDict[Waiting, None] = OrderedDict()
        # Rows of a request that failed: each goes again, alone and first, so that only the bad one fails.
        self._alone: deque[_Row] = deque()
        self._at_model = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, encoded: Sequence[Encoded | RowError], deadline: Deadline, lease: Lease) -> list[Outcome]:
        """Return one outcome per row, in order. Raises ServerError where the whole call cannot be answered."""
        loop = asyncio.get_running_loop()
        call = Waiting(encoded, deadline, lease, loop.create_future())
        if call.rows:
            timer = loop.call_later(deadline.remaining_s(), call.expire)
            self._line[call] = None
            try:
                self._send()
                await call.done
            finally:
                timer.cancel()
                self._leave(call)
        return [outcome for outcome in call.outcomes if outcome is not None]

    @property
    def busy(self) -> bool:
        """Whether anything of it waits or is on its way."""
        return bool(self._line or self._alone or self._at_model)

    async def close(self) -> None:
        """End what is on its way and what waits: nothing is sent any more."""
        for call in list(self._line):
            call.fail(_STOPPING)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S)

    def _leave(self, call: Waiting) -> None:
        """Take a call out of the line: its rows that wait are dropped, and a request of abandoned rows alone is ended."""
        self._line.pop(call, None)
        if not call.done.cancel() and not call.done.cancelled():
            call.done.exception()  # seen: a caller may leave in the moment in which its call fails
        for request in call.requests:
            request.cancel_if_abandoned()
        call.requests.clear()

    def _send(self) -> None:
        """Send what waits, as far as there are places at the model."""
        while self._at_model < self._most and (rows := self._next()):
            self._at_model += 1
            request = _Request(rows, self._freed)
            # The first row's trace goes on to the model; the others are linked to it. A copy: requests of one call that
            # run side by side would take each other's span for their parent.
            task = asyncio.create_task(self._run(request), context=request.calls[0].context.copy())
            request.task = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(request.leave)

    def _freed(self) -> None:
        self._at_model -= 1
        self._send()

    def _next(self) -> list[_Row]:
        """Return the rows of the next request, empty where none waits."""
        while self._alone:
            row = self._alone.popleft()
            if _alive(row.call):
                return [row]
        window = list(itertools.islice(self._window(), self._bounds.window_rows))
        if not window:
            return []
        first = window[0].call
        chosen = neighbours(self.model.spec, [row.encoded.tokens for row in window], self._bounds)
        rows = [window[place] for place in sorted(chosen)]
        for row in rows:
            row.call.rows.remove(row)
            if not row.call.rows:
                self._line.pop(row.call, None)
        if first.rows:
            self._line.move_to_end(first)
        return rows

    def _window(self) -> Iterator[_Row]:
        """Yield the rows of the call whose turn it is, then those of the others: one of each call, then the second of each.

        Its own come first: where many single calls wait, a list that got one row a turn would never end in time.
        """
        calls: list[Waiting] = []
        late: list[Waiting] = []
        for call in self._line:
            if len(calls) == self._bounds.window_rows:
                break
            (calls if _alive(call) else late).append(call)
        for call in late:
            del self._line[call]
        if calls:
            yield from calls.pop(0).rows
        for turn in itertools.count():
            calls = [call for call in calls if turn < len(call.rows)]
            if not calls:
                return
            for call in calls:
                yield call.rows[turn]

    async def _run(self, request: _Request) -> None:
        """Run a request, and tell each of its calls how it ended, whatever happens."""
        try:
            try:
                outcomes = await self._infer(request)
            except ModelFailed as exc:
                await self._failed(request, exc)
                return
            request.leave()  # the next request goes out before these answers are written
            for row, outcome in zip(request.rows, outcomes, strict=True):
                row.call.settle(row.place, outcome)
        except TwodoorError as exc:
            request.fail(exc)
        except Exception as exc:
            log.exception("a joined request failed")
            request.fail(exc)

    async def _infer(self, request: _Request) -> list[Answer | RowError]:
        """Send a request; it has until the latest of its calls' deadlines."""
        deadline = max((call.deadline for call in request.calls), key=lambda deadline: deadline.at_s)
        links = [call.context for call in request.calls[1:]]
        request.hold()
        with span("triton infer", kind=SpanKind.CLIENT, links=links):
            return await self._pipeline.infer(
                self.model,
                [row.encoded for row in request.rows],
                "interactive",
                deadline,
                inject_headers(),
                ended=request.drop,
            )

    async def _failed(self, request: _Request, error: ModelFailed) -> None:
        """Let each row run alone; one that was alone gets the error, unless the model fails on its known row too."""
        if len(request.rows) > 1:
            self._alone.extend(request.rows)
            return
        (row,) = request.rows
        deadline = row.call.deadline
        if not isinstance(error, ModelRefused) and not await self._pipeline.canary_passes(
            self.model, "interactive", deadline
        ):
            deadline.remaining_s()
            raise DependencyDown(f"model {self.model.spec.name} fails on its known row too") from error
        row.call.settle(row.place, error)


def _alive(call: Waiting) -> bool:
    """Return whether somebody waits for the call, and not in vain; a late one is told so."""
    if call.done.done():
        return False
    try:
        call.deadline.remaining_s()
    except DeadlineExceeded as exc:
        call.fail(exc)
        return False
    return True
