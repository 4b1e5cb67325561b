"""Jobs of the load processes: who is called, in which rhythm. Everything here travels to another process."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import uvloop

from benchmarks.callers import Expected, HttpConnection, get, grpc_calls, http_calls, post
from benchmarks.load import Call, LoadResult, closed_loop, open_loop
from benchmarks.stats import IdArray

Address = tuple[str, int]


class Target(Protocol):
    """Something that can be called over a number of connections."""

    def calls(self, callers: int) -> AbstractAsyncContextManager[list[Call]]:
        """Open the connections; gives one call function for each."""
        ...


@dataclass(frozen=True, slots=True)
class Predict:
    """``POST /predict`` of the gateway."""

    address: Address
    texts: Sequence[str]
    expected: Sequence[Expected]
    models: tuple[str, ...] = ()
    """Models that the calls name by turns; without any, the gateway's default."""

    def calls(self, callers: int) -> AbstractAsyncContextManager[list[Call]]:
        """Open keep-alive connections."""
        return http_calls(self.address, self.texts, self.expected, callers, self.models)


@dataclass(frozen=True, slots=True)
class Direct:
    """The same rows' tensors straight to Triton by gRPC."""

    address: str
    model: str
    output: str
    rows: Sequence[dict[str, IdArray]]
    expected: Sequence[Expected]

    def calls(self, callers: int) -> AbstractAsyncContextManager[list[Call]]:
        """Open one channel that all callers share."""
        return grpc_calls(self.address, self.model, self.output, self.rows, self.expected, callers)


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop. ``late``: calls begun in time and answered later count as well."""

    target: Target
    callers: int
    warm_s: float
    seconds: float
    late: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """An open loop; ``offsets_s`` are the intended starts."""

    target: Target
    connections: int
    offsets_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Probe:
    """``GET /healthz`` over one connection, every ``interval_s``."""

    address: Address
    interval_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LongTexts:
    """One caller that sends a long text again and again, by turns with and without ``truncate``."""

    address: Address
    text: str
    seconds: float


def run_closed(job: Closed) -> LoadResult:
    """Run a closed loop (in a worker)."""

    async def work() -> LoadResult:
        async with job.target.calls(job.callers) as calls:
            return await closed_loop(calls, job.warm_s, job.seconds, late=job.late)

    return uvloop.run(work())


def run_open(job: Open) -> LoadResult:
    """Run an open loop (in a worker)."""

    async def work() -> LoadResult:
        async with job.target.calls(job.connections) as calls:
            return await open_loop(calls, job.offsets_s)

    return precise_run(work)


def run_probe(job: Probe) -> LoadResult:
    """Ask for ``/healthz`` in a fixed rhythm (in a worker): a gap of the server's event loop is a late answer."""
    request = get("/healthz", f"{job.address[0]}:{job.address[1]}")
    connection = HttpConnection(*job.address)

    async def call(_number: int) -> str:
        status, _ = await connection.send(request)
        return "" if status == 200 else f"status {status}"

    async def work() -> LoadResult:
        await connection.send(request)
        moments = [n * job.interval_s for n in range(int(job.seconds / job.interval_s))]
        try:
            return await open_loop([call], moments)
        finally:
            await connection.close()

    return precise_run(work)


def run_long_texts(job: LongTexts) -> LoadResult:
    """Send long texts (in a worker): cut ones must be answered, whole ones refused as ``text_too_long``."""
    host = f"{job.address[0]}:{job.address[1]}"
    requests = [post("/predict", orjson.dumps({"text": job.text, "truncate": cut}), host) for cut in (True, False)]
    connection = HttpConnection(*job.address)

    async def call(number: int) -> str:
        status, body = await connection.send(requests[number % 2])
        if number % 2 == 0:
            return "" if status == 200 else f"status {status}"
        code = orjson.loads(body).get("code")
        return "" if (status, code) == (422, "text_too_long") else f"status {status} {code}"

    async def work() -> LoadResult:
        try:
            return await closed_loop([call], 0.0, job.seconds, late=True)
        finally:
            await connection.close()

    return uvloop.run(work())


def precise_run(work: Callable[[], Coroutine[Any, Any, LoadResult]]) -> LoadResult:
    """Run on an event loop whose timers are exact: epoll's and uvloop's round up to whole milliseconds."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(work())
