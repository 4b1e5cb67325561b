"""The stream: many texts on one WebSocket, each answered as soon as its answer is there.

A message is answered by exactly one message with its id, an output or an error; a connection is closed only where it
cannot go on. Sizes, receipt and writing are bounded below, in `gateway.stream_socket`.
"""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import structlog
from opentelemetry.trace import SpanKind
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.envelope import header, request_id_of
from gateway.keys import Caller, caller_now
from gateway.metrics import Metrics
from gateway.problems import Problem, problem_of, render
from gateway.routes import Door, decode, timeout_ms_of
from gateway.stream_forms import answer_of, error_of, message_id, parse_message
from gateway.stream_socket import GONE, STOPPING
from serving.codec import encode_json
from serving.deadline import Deadline
from serving.errors import Overloaded, QuotaError, TwodoorError
from serving.settings import GatewaySettings
from serving.telemetry import span

log = structlog.get_logger(__name__)

_FULL_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Close:
    """Why we close. ``finish``: what is unanswered is answered first."""

    code: int
    reason: str
    finish: bool = False


_STOPPED = Close(1001, "the service is stopping", finish=True)
_BINARY = Close(1003, "send text messages")
_NO_KEY = Close(1008, "the key is no longer known")


class Stream:
    """The route's ASGI app; it counts the open connections, so one instance per process."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics) -> None:
        self._settings = settings
        self._origins = {origin.strip().lower() for origin in settings.stream_origins.split(",") if origin.strip()}
        self._open = 0
        metrics.stream_connections.set_function(lambda: self._open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket; a handshake that is refused gets a problem as any request."""
        await receive()  # the handshake
        try:
            timeout_ms = self._check(scope)
        except Problem as problem:
            await render(problem, request_id_of(scope))(scope, receive, send)
            return
        self._open += 1
        try:
            await Session(scope, receive, send, timeout_ms).run()
        finally:
            self._open -= 1

    def _check(self, scope: Scope) -> int:
        """Return the deadline of each message in milliseconds; raises Problem.

        Without keys a page of any site could use the model through its visitor's browser, which asks no leave for a
        WebSocket; with keys no page can, for it cannot send a header. Programs send no Origin.
        """
        origin = header(scope, b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in self._origins:
            detail = "pages of this origin may not open a stream"
            raise Problem(403, "forbidden", detail, field="header Origin")
        if scope["query_string"]:
            raise Problem(422, "invalid_request", "a stream takes no query; send messages", field="query")
        timeout_ms = timeout_ms_of(scope, self._settings)
        most = self._settings.stream_max_connections
        if self._open >= most:
            detail = "as many streams are open as this process takes"
            raise Problem(503, Overloaded.code, detail, limit=most, retry_after_s=_FULL_RETRY_S)
        return timeout_ms


class Session:
    """One open connection: reads while fewer than the bound are unanswered, and answers in whatever order they end."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, timeout_ms: int) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._door = cast("Door", scope["state"]["door"])
        self._gone = cast("asyncio.Event", scope[GONE])
        self._timeout_s = timeout_ms / 1000
        self._places = asyncio.Semaphore(self._door.settings.stream_max_unanswered)
        self._answering: set[asyncio.Task[None]] = set()
        self._killed = False

    async def run(self) -> None:
        """Serve until the caller leaves, breaks a rule or is silent for too long, or until the server stops."""
        work = asyncio.create_task(self._serve(), name="stream")
        gone = asyncio.create_task(self._gone.wait(), name="stream gone")
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Only the server cancels: at its stop, for what goes on past TWODOOR_GATEWAY_SHUTDOWN_TIMEOUT_S.
            self._killed = True
        gone.cancel()
        work.cancel()
        unanswered = list(self._answering)
        for task in unanswered:
            task.cancel()
        ended = await asyncio.gather(work, *unanswered, return_exceptions=True)
        if self._killed:
            await self._close(_STOPPED)
        for failure in ended:
            if isinstance(failure, Exception) and not isinstance(failure, OSError):
                raise failure

    async def _serve(self) -> None:
        await self._send({"type": "websocket.accept"})
        close = await self._read()
        if close is None:
            return
        if close.finish and self._answering:
            await asyncio.wait(self._answering)
        await self._close(close)

    async def _read(self) -> Close | None:
        """Take messages until one ends the connection; returns how to close it, None where the caller has."""
        while True:
            await self._places.acquire()
            message = await self._next()
            kind = message["type"]
            if kind == "websocket.receive" and message.get("text") is not None:
                caller = caller_now(self._scope)
                if caller is None:
                    return _NO_KEY
                await self._take(message.pop("text").encode(), caller)
            elif kind == "websocket.receive":
                return _BINARY
            elif kind == STOPPING:
                return _STOPPED
            elif kind == "idle":
                return Close(1000, f"no message for {self._door.settings.stream_idle_timeout_s:g} s")
            else:
                return None

    async def _next(self) -> Message:
        """Return the next event, or ``idle`` where none came in time although nothing is unanswered."""
        while True:
            try:
                async with asyncio.timeout(self._door.settings.stream_idle_timeout_s):
                    return await self._receive()
            except TimeoutError:
                if not self._answering:
                    return {"type": "idle"}

    async def _take(self, content: bytes, caller: Caller) -> None:
        """Have a message answered; its bytes count as held until its answer is written.

        Where as many are held as may be, only its id is looked for, and nothing more is read before it is answered.
        """
        held, full = ExitStack(), None
        try:
            held.enter_context(self._door.bodies.held(len(content)))
        except Overloaded as exc:
            full = exc
        task = asyncio.create_task(self._answer(content, caller, full), name="stream message")
        self._answering.add(task)
        task.add_done_callback(partial(self._answered, held))
        if full is not None:
            await asyncio.wait((task,))

    def _answered(self, held: ExitStack, task: "asyncio.Task[None]") -> None:
        held.close()
        self._answering.discard(task)
        self._places.release()

    async def _answer(self, content: bytes, caller: Caller, full: Overloaded | None) -> None:
        """Answer one message, whatever is wrong with it; ends early where there is nobody to answer."""
        began_s = time.monotonic()
        metrics = self._door.metrics
        answer: dict[str, Any] = {"id": None}
        try:
            with span("stream message", kind=SpanKind.SERVER):
                answer |= await self._outcome(content, caller, full, answer, Deadline(began_s + self._timeout_s))
            await self._say(answer)
        except OSError:
            metrics.stream_messages.labels("caller_gone").inc()
            return
        except asyncio.CancelledError:
            metrics.stream_messages.labels("overloaded" if self._killed else "caller_gone").inc()
            if self._killed:
                stopping = error_of(problem_of(Overloaded("the service is stopping")))
                await self._say(answer if len(answer) > 1 else answer | stopping)
            raise
        metrics.stream_seconds.observe(time.monotonic() - began_s)
        metrics.stream_messages.labels(answer["error"]["code"] if "error" in answer else "ok").inc()

    async def _outcome(
        self, content: bytes, caller: Caller, full: Overloaded | None, answer: dict[str, Any], deadline: Deadline
    ) -> dict[str, Any]:
        """Return the output or the error of a message; puts its id into the answer as soon as it is known."""
        try:
            value = await decode(content, self._door.settings.offload_bytes, "message")
            answer["id"] = message_id(value)
            if full is not None:
                raise full
            call = parse_message(value)
            await self._door.limits.take(caller, 1)
            model, outcomes = await self._door.predictor.run(call, deadline)
            return answer_of(outcomes[0], model.spec, self._door.settings)
        except Problem as problem:
            return error_of(problem)
        except TwodoorError as exc:
            if isinstance(exc, QuotaError):
                self._door.metrics.shed.labels(exc.code).inc()
            return error_of(problem_of(exc))
        except Exception:
            log.exception("a message of the stream failed", request_id=request_id_of(self._scope))
            return error_of(Problem(500, "internal_error", "the service failed; the log has the reason"))

    async def _say(self, answer: dict[str, Any]) -> None:
        await self._send({"type": "websocket.send", "text": encode_json(answer).decode()})

    async def _close(self, close: Close) -> None:
        await self._send({"type": "websocket.close", "code": close.code, "reason": close.reason})


async def upgrade_required(request: Request) -> Response:
    """Tell who came without a whole WebSocket handshake what belongs to one."""
    raise Problem(
        426,
        "upgrade_required",
        "open a WebSocket here: GET with Connection: Upgrade, Upgrade: websocket, Sec-WebSocket-Version: 13 and a "
        "Sec-WebSocket-Key, without a body, behind no request that is still unanswered",
        headers={"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"},
    )
