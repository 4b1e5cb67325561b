"""The two kinds of callers, light enough to share the cores they measure: raw HTTP/1.1, and gRPC straight to Triton."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import orjson

from benchmarks.load import CALL_TIMEOUT_S, Call
from benchmarks.stats import IdArray

SCORE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Expected:
    """The right answer of a text, by the model's own file in plain ONNX Runtime."""

    positive: bool
    score: float

    def fault(self, positive: bool, score: float) -> str:
        """Return an empty string, or what is wrong; a label may only differ where the score is a coin's toss."""
        if abs(score - self.score) > SCORE_TOLERANCE:
            return "wrong score"
        if positive != self.positive and abs(self.score - 0.5) > SCORE_TOLERANCE:
            return "wrong label"
        return ""


class HttpConnection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection with one request at a time; it dials again after the server closed it.

    It understands answers that have a Content-Length, which is what the gateway sends, and nothing else.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._buffer = bytearray()
        self._lost = asyncio.Event()
        self._lost.set()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._transport is not None

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Send one whole request; returns status and body. Raises OSError where the connection broke."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            await loop.create_connection(lambda: self, self._host, self._port)
        assert self._transport is not None
        self._buffer.clear()
        self._answer = loop.create_future()
        self._transport.write(request)
        try:
            return await self._answer
        except asyncio.CancelledError:
            # An answer that comes now would be taken for the next call's.
            self._abort()
            raise

    async def close(self) -> None:
        """Close the connection and wait until the event loop has let go of it."""
        self._abort()
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await self._lost.wait()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (called by the event loop)."""
        # uvloop's transports are of no asyncio class.
        self._transport = cast("asyncio.Transport", transport)
        self._lost.clear()

    def data_received(self, data: bytes) -> None:
        """Collect bytes until the answer is whole (called by the event loop)."""
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0 or self._answer is None or self._answer.done():
            return
        head = bytes(self._buffer[:head_end]).lower()
        length = _content_length(head)
        if length is None:
            self._answer.set_exception(ConnectionError("answer without a length"))
        elif len(self._buffer) >= head_end + 4 + length:
            self._answer.set_result((int(head[9:12]), bytes(self._buffer[head_end + 4 : head_end + 4 + length])))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the call in flight (called by the event loop)."""
        self._transport = None
        self._lost.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("connection lost"))


def _content_length(head: bytes) -> int | None:
    at = head.find(b"\r\ncontent-length:")
    if at < 0:
        return None
    end = head.find(b"\r\n", at + 2)
    return int(head[at + 17 : end if end >= 0 else len(head)])


def post(path: str, body: bytes, host: str) -> bytes:
    """Return a whole POST request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(path: str, host: str) -> bytes:
    """Return a whole GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def http_calls(
    address: tuple[str, int],
    texts: Sequence[str],
    expected: Sequence[Expected],
    callers: int,
    models: Sequence[str] = (),
) -> AbstractAsyncContextManager[list[Call]]:
    """Open connections to ``/predict``; each call sends one text and checks its answer.

    ``models``: the calls name these models by turns; without any, the server's default answers.
    """
    host, port = address
    named: list[dict[str, str]] = [{"model": model} for model in models] or [{}]
    bodies = [orjson.dumps({"text": text} | names) for text in texts for names in named]
    requests = [post("/predict", body, f"{host}:{port}") for body in bodies]

    def read(answer: Any) -> tuple[bool, float]:
        return answer["sentiment"] == "positive", answer["score"]

    right = [expected[index // len(named)] for index in range(len(requests))]
    return checked_calls(address, requests, right, read, callers, get("/healthz", f"{host}:{port}"))


@asynccontextmanager
async def checked_calls(
    address: tuple[str, int],
    requests: Sequence[bytes],
    expected: Sequence[Expected],
    read: Callable[[Any], tuple[bool, float]],
    callers: int,
    first: bytes | None,
) -> AsyncIterator[list[Call]]:
    """Open connections by the request ``first`` (None: the first call dials); each call sends the request of its number.

    ``read`` takes label and score out of an answer's JSON, whoever the server is.
    """

    def call_over(connection: HttpConnection) -> Call:
        async def call(number: int) -> str:
            index = number % len(requests)
            status, body = await connection.send(requests[index])
            if status != 200:
                return f"status {status}"
            try:
                positive, score = read(orjson.loads(body))
            except (LookupError, TypeError, ValueError):
                return "an answer of another form"
            return expected[index].fault(positive, score)

        return call

    connections = [HttpConnection(*address) for _ in range(callers)]
    try:
        if first is not None:
            await _dial(connections, first)
        yield [call_over(connection) for connection in connections]
    finally:
        await asyncio.gather(*(connection.close() for connection in connections))


async def _dial(connections: Sequence[HttpConnection], request: bytes) -> None:
    """Connect all, so that no measured call pays for it."""
    async with asyncio.timeout(CALL_TIMEOUT_S):
        await asyncio.gather(*(connection.send(request) for connection in connections))


@asynccontextmanager
async def grpc_calls(
    address: str,
    model: str,
    output: str,
    rows: Sequence[dict[str, IdArray]],
    expected: Sequence[Expected],
    callers: int,
) -> AsyncIterator[list[Call]]:
    """Open one channel to Triton, as a door has; each call sends one row of ready-made tensors and checks its answer."""
    # Imported here: only the process that makes these calls pays for gRPC.
    from tritonclient.grpc import InferInput, InferRequestedOutput
    from tritonclient.grpc.aio import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    inputs = [[_tensor(InferInput, name, array) for name, array in row.items()] for row in rows]
    outputs = [InferRequestedOutput(output)]
    client = InferenceServerClient(address)

    async def call(number: int) -> str:
        index = number % len(inputs)
        try:
            result = await client.infer(model, inputs[index], outputs=outputs)
        except InferenceServerException as exc:
            return f"triton {exc.status()}"
        return expected[index].fault(*answer_of(result.as_numpy(output)[0]))

    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await client.get_server_metadata()
        yield list(itertools.repeat(call, callers))
    finally:
        await client.close()


def _tensor(make: Any, name: str, array: IdArray) -> Any:
    tensor = make(name, list(array.shape), "INT64")
    tensor.set_data_from_numpy(array)
    return tensor


def answer_of(logits: Any) -> tuple[bool, float]:
    """Return whether two logits say positive, and the probability of positive."""
    negative, positive = (float(value) for value in logits)
    return positive > negative, float(1 / (1 + np.exp(negative - positive)))
