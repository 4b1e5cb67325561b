"""The Python client, sync and async: both carry out the same flows, one by blocking and one by awaiting."""

from collections.abc import Mapping, Sequence

import httpx

from twodoor import wire
from twodoor.job_calls import JobCalls
from twodoor.job_calls_async import AsyncJobCalls
from twodoor.stream_calls import AsyncStreamCalls, StreamCalls
from twodoor.transport import Core
from twodoor.wire import Flow, Prediction, Predictions


class Client(JobCalls, StreamCalls):
    """Calls `/predict`, the stream and the job API and waits for the answers. Safe to share between threads; close it, or use ``with``.

    ``url``: the gateway; default ``TWODOOR_CLIENT_URL``, or the local gateway. ``api_key``: default
    ``TWODOOR_CLIENT_API_KEY``. ``timeout_s``: deadline of a call with all its tries. ``retries``: how often to come
    back after 429, 503 or a broken connection, no sooner than ``Retry-After`` says; where that is over
    ``max_retry_wait_s`` or the deadline, the error is raised at once.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        max_retry_wait_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 32,
    ) -> None:
        super().__init__(url, timeout_s, retries, max_retry_wait_s)
        self._http = httpx.Client(**self._options(headers, max_connections, api_key))

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
        return wire.only_row(self._run(_flow(self, [text], model, truncate, timeout_s, request_id)))

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
        return self._run(_flow(self, texts, model, truncate, timeout_s, request_id))


class AsyncClient(AsyncJobCalls, AsyncStreamCalls):
    """The same as `Client`, awaited. Belongs to the event loop it is first used on; close it, or use ``async with``."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        max_retry_wait_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 32,
    ) -> None:
        super().__init__(url, timeout_s, retries, max_retry_wait_s)
        self._http = httpx.AsyncClient(**self._options(headers, max_connections, api_key))

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
        return wire.only_row(await self._run(_flow(self, [text], model, truncate, timeout_s, request_id)))

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
        return await self._run(_flow(self, texts, model, truncate, timeout_s, request_id))


def _flow(
    core: Core,
    texts: Sequence[str],
    model: str | None,
    truncate: bool,
    timeout_s: float | None,
    request_id: str | None,
) -> Flow[Predictions]:
    if isinstance(texts, str):
        raise TypeError("texts is one string; use predict(text), or a list")
    return wire.predict_flow(texts, model, truncate, core.wanted_s(timeout_s), core.retry, request_id)
