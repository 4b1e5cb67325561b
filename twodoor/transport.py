"""Carries out the flows, once by blocking and once by awaiting. Only here is there input and output over the network."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx

from twodoor.config import ClientConfig
from twodoor.wire import Body, Emit, Flow, Outcome, Retry, Send, Step, Wait

T = TypeVar("T")


class Core:
    """What both clients have in common: where to call and how to ask. Shows no key."""

    def __init__(self, url: str | None, timeout_s: float, retries: int, max_retry_wait_s: float) -> None:
        self._config = ClientConfig.from_environ()
        self.url = (url or self._config.url).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is no http:// or https:// address")
        try:
            _ = parts.port
        except ValueError:
            raise ValueError(f"{self.url!r} has no port from 0 to 65535") from None
        self.is_loopback = parts.hostname in ("127.0.0.1", "::1", "localhost")
        self._timeout_s = timeout_s
        self.retry = Retry(retries, max_retry_wait_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _options(self, headers: Mapping[str, str] | None, max_connections: int, api_key: str | None) -> dict[str, Any]:
        # A proxy from the environment cannot reach our own loopback.
        return {
            "base_url": self.url,
            "headers": {**_authorization(api_key or self._config.api_key), **(headers or {})},
            "trust_env": not self.is_loopback,
            "limits": httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        }

    def wanted_s(self, timeout_s: float | None) -> float:
        """Return the timeout of a call: its own, or the client's."""
        return self._timeout_s if timeout_s is None else timeout_s


class SyncCore(Core):
    """A client that blocks."""

    _http: httpx.Client

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        """Carry a flow out to its end; what it emits on the way is dropped."""
        with _Exchange(self._http) as exchange:
            outcome: Outcome = None
            while True:
                try:
                    step = flow.send(outcome)
                except StopIteration as done:
                    result: T = done.value
                    return result
                outcome = None if isinstance(step, Emit) else exchange.carry_out(step)

    def _iterate(self, flow: Flow[Any]) -> Iterator[Any]:
        """Carry a flow out and yield what it emits; a caller who stops early closes the connection."""
        with _Exchange(self._http) as exchange:
            outcome: Outcome = None
            while True:
                try:
                    step = flow.send(outcome)
                except StopIteration:
                    return
                if isinstance(step, Emit):
                    yield step.item
                    outcome = None
                else:
                    outcome = exchange.carry_out(step)


class _Exchange:
    """The steps of one flow; holds at most one streamed answer open."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._streamed: httpx.Response | None = None
        self._pieces: Iterator[bytes] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def carry_out(self, step: Step) -> Outcome:
        if isinstance(step, Wait):
            time.sleep(step.seconds)
            return None
        try:
            if isinstance(step, Send):
                return self._send(step)
            return next(self._pieces, b"")
        except httpx.RequestError as error:
            return error

    def _send(self, step: Send) -> httpx.Response:
        """Send and read; httpx bounds each read, and the whole answer has the same bound, whatever drips in."""
        self._drop()
        whole = isinstance(step.content, bytes)
        ends = time.monotonic() + step.timeout_s
        content = step.content if isinstance(step.content, bytes) else step.content.pieces()
        request = self._http.build_request(
            step.method, step.path, content=content, headers=step.headers, timeout=step.timeout_s
        )
        response = self._http.send(request, stream=True)
        if step.streamed and response.is_success:
            self._streamed, self._pieces = response, response.iter_raw()
            return response
        try:
            ends = ends if whole else time.monotonic() + step.timeout_s
            pieces = []
            for piece in response.iter_raw():
                pieces.append(piece)
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout("deadline")
        finally:
            response.close()
        return _complete(response, b"".join(pieces))

    def _drop(self) -> None:
        if self._streamed is not None:
            self._streamed.close()
            self._streamed = None


class AsyncCore(Core):
    """A client that awaits."""

    _http: httpx.AsyncClient

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, flow: Flow[T]) -> T:
        """Carry a flow out to its end; what it emits on the way is dropped."""
        async with _AsyncExchange(self._http) as exchange:
            outcome: Outcome = None
            while True:
                try:
                    step = flow.send(outcome)
                except StopIteration as done:
                    result: T = done.value
                    return result
                outcome = None if isinstance(step, Emit) else await exchange.carry_out(step)

    async def _iterate(self, flow: Flow[Any]) -> AsyncGenerator[Any, None]:
        """Carry a flow out and yield what it emits; a caller who stops early closes the connection."""
        async with _AsyncExchange(self._http) as exchange:
            outcome: Outcome = None
            while True:
                try:
                    step = flow.send(outcome)
                except StopIteration:
                    return
                if isinstance(step, Emit):
                    yield step.item
                    outcome = None
                else:
                    outcome = await exchange.carry_out(step)


class _AsyncExchange:
    """The same, awaited."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._streamed: httpx.Response | None = None
        self._pieces: AsyncIterator[bytes] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._drop()

    async def carry_out(self, step: Step) -> Outcome:
        if isinstance(step, Wait):
            await asyncio.sleep(step.seconds)
            return None
        try:
            if isinstance(step, Send):
                return await self._send(step)
            return await anext(self._pieces, b"") if self._pieces is not None else b""
        except httpx.RequestError as error:
            return error
        except TimeoutError:
            return httpx.ReadTimeout("deadline")

    async def _send(self, step: Send) -> httpx.Response:
        await self._drop()
        whole = isinstance(step.content, bytes)
        content = step.content if isinstance(step.content, bytes) else _off_loop(step.content)
        request = self._http.build_request(
            step.method, step.path, content=content, headers=step.headers, timeout=step.timeout_s
        )
        # httpx bounds each read; the whole answer has the same bound, whatever drips in.
        async with asyncio.timeout(step.timeout_s if whole else None) as bound:
            response = await self._http.send(request, stream=True)
            if step.streamed and response.is_success:
                self._streamed, self._pieces = response, response.aiter_raw()
                return response
            try:
                if not whole:
                    bound.reschedule(asyncio.get_running_loop().time() + step.timeout_s)
                return _complete(response, b"".join([piece async for piece in response.aiter_raw()]))
            finally:
                await response.aclose()

    async def _drop(self) -> None:
        if self._streamed is not None:
            await self._streamed.aclose()
            self._streamed = self._pieces = None


async def _off_loop(body: Body) -> AsyncIterator[bytes]:
    """Read and compress on a thread: files block."""
    pieces = body.pieces()
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


def _complete(response: httpx.Response, content: bytes) -> httpx.Response:
    return httpx.Response(response.status_code, headers=response.headers, content=content, request=response.request)


def _authorization(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ValueError("the API key holds a character that no key can have (a space, a quote of a text editor, …)")
    return {"Authorization": f"Bearer {api_key}"}
