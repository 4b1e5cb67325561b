"""The Python client, sync and async: both carry out the same flows, one by blocking and one by awaiting."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from twodoor import wire
from twodoor.config import ClientConfig
from twodoor.wire import Flow, Prediction, Predictions, Retry, Send, Wait


class _Core:
    """What both clients have in common: where to call and how to ask."""

    def __init__(self, url: str | None, timeout_s: float, retries: int, max_retry_wait_s: float) -> None:
        self.url = (url or ClientConfig.from_environ().url).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.url!r} is no http:// or https:// address")
        try:
            _ = parts.port
        except ValueError:
            raise ValueError(f"{self.url!r} has no port from 0 to 65535") from None
        self._loopback = parts.hostname in ("127.0.0.1", "::1", "localhost")
        self._timeout_s = timeout_s
        self._retry = Retry(retries, max_retry_wait_s)

    def _options(self, headers: Mapping[str, str] | None, max_connections: int) -> dict[str, Any]:
        # A proxy from the environment cannot reach our own loopback.
        return {
            "base_url": self.url,
            "headers": dict(headers or {}),
            "trust_env": not self._loopback,
            "limits": httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        }

    def _flow(
        self,
        texts: Sequence[str],
        model: str | None,
        truncate: bool,
        timeout_s: float | None,
        request_id: str | None,
    ) -> Flow:
        if isinstance(texts, str):
            raise TypeError("texts is one string; use predict(text), or a list")
        wanted_s = self._timeout_s if timeout_s is None else timeout_s
        return wire.predict_flow(texts, model, truncate, wanted_s, self._retry, request_id)


class Client(_Core):
    """Calls `/predict` and waits for the answer. Safe to share between threads; close it, or use ``with``.

    ``url``: the gateway; default ``TWODOOR_CLIENT_URL``, or the local gateway. ``timeout_s``: deadline of a call
    with all its tries. ``retries``: how often to come back after 429, 503 or a broken connection, no sooner than
    ``Retry-After`` says; where that is over ``max_retry_wait_s`` or the deadline, the error is raised at once.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout_s: float = 10.0,
        retries: int = 2,
        max_retry_wait_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 32,
    ) -> None:
        super().__init__(url, timeout_s, retries, max_retry_wait_s)
        self._http = httpx.Client(**self._options(headers, max_connections))

    def predict(
        self,
        text: str,
        *,
        model: str | None = None,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Prediction:
        """Return the answer for one text; raises RowFailed where the text has none, and the tree's other errors."""
        return wire.only_row(self._drive(self._flow([text], model, truncate, timeout_s, request_id)))

    def predict_many(
        self,
        texts: Sequence[str],
        *,
        model: str | None = None,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Predictions:
        """Return the answers for a list of texts in one call; a text without an answer has its RowFailed in place."""
        return self._drive(self._flow(texts, model, truncate, timeout_s, request_id))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drive(self, flow: Flow) -> Predictions:
        outcome: wire.Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as done:
                answer: Predictions = done.value
                return answer
            outcome = self._carry_out(step)

    def _carry_out(self, step: Send | Wait) -> wire.Outcome:
        if isinstance(step, Wait):
            time.sleep(step.seconds)
            return None
        try:
            return self._post(step)
        except httpx.RequestError as error:
            return error

    def _post(self, step: Send) -> httpx.Response:
        """Send and read; httpx bounds each read, and the whole answer has the same bound, whatever drips in."""
        ends = time.monotonic() + step.timeout_s
        with self._http.stream(
            "POST", step.path, content=step.content, headers=step.headers, timeout=step.timeout_s
        ) as response:
            pieces = []
            for piece in response.iter_raw():
                pieces.append(piece)
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout("deadline")
            return httpx.Response(
                response.status_code, headers=response.headers, content=b"".join(pieces), request=response.request
            )


class AsyncClient(_Core):
    """The same as `Client`, awaited. Belongs to the event loop it is first used on; close it, or use ``async with``."""

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout_s: float = 10.0,
        retries: int = 2,
        max_retry_wait_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 32,
    ) -> None:
        super().__init__(url, timeout_s, retries, max_retry_wait_s)
        self._http = httpx.AsyncClient(**self._options(headers, max_connections))

    async def predict(
        self,
        text: str,
        *,
        model: str | None = None,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Prediction:
        """Return the answer for one text; raises RowFailed where the text has none, and the tree's other errors."""
        return wire.only_row(await self._drive(self._flow([text], model, truncate, timeout_s, request_id)))

    async def predict_many(
        self,
        texts: Sequence[str],
        *,
        model: str | None = None,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Predictions:
        """Return the answers for a list of texts in one call; a text without an answer has its RowFailed in place."""
        return await self._drive(self._flow(texts, model, truncate, timeout_s, request_id))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _drive(self, flow: Flow) -> Predictions:
        outcome: wire.Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as done:
                answer: Predictions = done.value
                return answer
            outcome = await self._carry_out(step)

    async def _carry_out(self, step: Send | Wait) -> wire.Outcome:
        if isinstance(step, Wait):
            await asyncio.sleep(step.seconds)
            return None
        try:
            # httpx bounds each read; the whole answer has the same bound, whatever drips in.
            async with asyncio.timeout(step.timeout_s):
                return await self._http.post(
                    step.path, content=step.content, headers=step.headers, timeout=step.timeout_s
                )
        except httpx.RequestError as error:
            return error
        except TimeoutError:
            return httpx.ReadTimeout("deadline")
