"""Plain FastAPI and ONNX Runtime, the two ways people write it; ``app_async`` and ``app_threads`` are for uvicorn."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers.servers.common import Model, Settings

ANSWER_S = 20.0
Answer = dict[str, Any]


class Request(BaseModel):
    """The body of a call."""

    text: str


class Answered(BaseModel):
    """The answer to a call."""

    label: str
    score: float


def app_async() -> FastAPI:
    """Handlers on the event loop. With batching a task collects rows and has a thread run the model."""
    settings = Settings.read()
    model = Model(settings)
    batcher = AsyncBatcher(model, settings) if settings.batching else None

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if batcher is None:
            yield
            return
        async with batcher.running():
            yield

    app = FastAPI(lifespan=lifespan)
    app.add_api_route("/healthz", healthz)

    @app.post("/predict")
    async def predict(request: Request) -> Answered:
        answer = model.answer([request.text])[0] if batcher is None else await batcher.answer(request.text)
        return Answered(**answer)

    return app


def app_threads() -> FastAPI:
    """Handlers in Starlette's thread pool. With batching they wait for one thread that collects rows."""
    settings = Settings.read()
    model = Model(settings)
    answer: Callable[[str], Answer] = (
        ThreadBatcher(model, settings).answer if settings.batching else lambda text: model.answer([text])[0]
    )
    app = FastAPI()
    app.add_api_route("/healthz", healthz)

    @app.post("/predict")
    def predict(request: Request) -> Answered:
        return Answered(**answer(request.text))

    return app


async def healthz() -> dict[str, str]:
    """Say that the server is there."""
    return {"status": "ok"}


class AsyncBatcher:
    """Collects rows until the batch is full or has waited long enough."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._rows: asyncio.Queue[tuple[str, asyncio.Future[Answer]]] = asyncio.Queue(maxsize=1024)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Collect while the block runs."""
        task = asyncio.create_task(self._collect())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def answer(self, text: str) -> Answer:
        """Return the answer of one text."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(ANSWER_S):
            await self._rows.put((text, future))
            return await future

    async def _collect(self) -> None:
        while True:
            batch = [await self._rows.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.max_wait_s):
                    while len(batch) < self._settings.max_batch:
                        batch.append(await self._rows.get())
            answers: Awaitable[list[Answer]] = asyncio.to_thread(self._model.answer, [text for text, _ in batch])
            for (_, future), answer in zip(batch, await answers, strict=True):
                if not future.done():
                    future.set_result(answer)


class ThreadBatcher:
    """The same with threads."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._rows: queue.Queue[tuple[str, Future[Answer]]] = queue.Queue(maxsize=1024)
        threading.Thread(target=self._collect, daemon=True, name="batcher").start()

    def answer(self, text: str) -> Answer:
        """Return the answer of one text."""
        future: Future[Answer] = Future()
        self._rows.put((text, future), timeout=ANSWER_S)
        return future.result(timeout=ANSWER_S)

    def _collect(self) -> None:
        while True:
            batch = [self._rows.get()]
            until_s = time.monotonic() + self._settings.max_wait_s
            with contextlib.suppress(queue.Empty):
                while len(batch) < self._settings.max_batch:
                    batch.append(self._rows.get(timeout=max(0.0, until_s - time.monotonic())))
            for (_, future), answer in zip(batch, self._model.answer([text for text, _ in batch]), strict=True):
                future.set_result(answer)
