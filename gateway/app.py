"""The application: the lifespan opens resources in order and closes them in reverse; routes, handlers and envelope around it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TypedDict

import structlog
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway import problems, routes
from gateway.admission import ByteBudget
from gateway.body import BodyReader
from gateway.envelope import Envelope
from gateway.metrics import Metrics
from gateway.openapi import document
from gateway.predict import Predictor
from gateway.routes import Door
from serving.pipeline import Pipeline
from serving.registry import Registry
from serving.settings import GatewaySettings, ModelSettings, TritonSettings
from serving.triton_client import TritonClient

log = structlog.get_logger(__name__)

# Long texts and big JSON only. Two: one long text must not hold up the rest, and the cores belong to the model.
_WORKERS = 2
OnFatal = Callable[[BaseException], None]


class State(TypedDict):
    """What the lifespan gives to every request."""

    door: Door


def build(gateway: GatewaySettings, models: ModelSettings, triton: TritonSettings, on_fatal: OnFatal) -> FastAPI:
    """Return the app. ``on_fatal`` is told when it cannot go on (a model's config is wrong); it has to end the process."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[State]:
        async with AsyncExitStack() as stack:
            executor = stack.enter_context(ThreadPoolExecutor(_WORKERS, thread_name_prefix="offload"))
            asyncio.get_running_loop().set_default_executor(executor)
            client = await stack.enter_async_context(TritonClient(triton))
            registry = Registry(client, models, triton)
            await stack.enter_async_context(_following(registry, on_fatal))
            predictor = Predictor(gateway, models.default, registry, Pipeline(client), metrics)
            bodies = BodyReader(gateway, ByteBudget(gateway.max_buffered_bytes, metrics))
            yield {"door": Door(gateway, registry, predictor, bodies, metrics)}

    # The framework's own documentation pages load their scripts from elsewhere, and its own spans hold the query, so
    # ``?text=``: ours do neither.
    app = FastAPI(
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        title="Twodoor",
        version="1",
        description="The interactive door.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.include_router(routes.router)
    _add_plain_routes(app)
    problems.install(app, metrics)
    paths = frozenset(_PLAIN) | {"/predict", "/openapi.json"}
    app.add_middleware(Envelope, metrics=metrics, label=lambda path: path if path in paths else "other")
    return app


_PLAIN = {
    "/healthz": routes.healthz,
    "/readyz": routes.readyz,
    "/metrics": routes.metrics,
    "/docs": routes.docs,
}


def _add_plain_routes(app: FastAPI) -> None:
    """Add the routes that take GET and HEAD and nothing else."""

    async def openapi(request: Request) -> Response:
        return JSONResponse(document(app))

    for path, endpoint in {**_PLAIN, "/openapi.json": openapi}.items():
        app.add_route(path, endpoint, methods=["GET"], include_in_schema=False)


@asynccontextmanager
async def _following(registry: Registry, on_fatal: OnFatal) -> AsyncIterator[None]:
    """Own the task that follows Triton; its end, which is never meant to come, is told."""
    task = asyncio.create_task(registry.run(), name="registry")

    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            on_fatal(error)

    task.add_done_callback(ended)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # told already
            await task
