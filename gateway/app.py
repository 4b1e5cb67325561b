"""The application: the lifespan opens resources in order and closes them in reverse; routes, handlers and envelope around it."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import TypedDict

import structlog
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import WebSocketRoute

from gateway import jobs_routes, problems, routes
from gateway.admission import ByteBudget
from gateway.body import BodyReader
from gateway.direct import DoorApp, predict_app
from gateway.envelope import Envelope
from gateway.job_door import JobDoor, Stores, following
from gateway.keys import Gate, Keys
from gateway.metrics import Metrics
from gateway.openapi import document
from gateway.predict import Predictor
from gateway.ratelimit import RateLimits
from gateway.results import Downloads
from gateway.routes import Door
from gateway.stream import Stream, upgrade_required
from gateway.stream_socket import PATH as STREAM
from gateway.uploads import Uploads
from gateway.waiting import Waiters
from jobs.intake import JobIntake
from jobs.objects import open_objects
from jobs.postgres import open_ledger
from serving.errors import ConfigError
from serving.pipeline import Pipeline
from serving.registry import Registry
from serving.settings import GatewaySettings, JobsSettings, ModelSettings, TritonSettings
from serving.startup import Phase
from serving.triton_client import TritonClient

log = structlog.get_logger(__name__)

# Long texts and big JSON only. Two: one long text must not hold up the rest, and the cores belong to the model.
_WORKERS = 2
# Uploads are hashed, cut and written in threads: more of them, so that a slow disk does not stand before a long text.
_JOB_WORKERS = 4
OnFatal = Callable[[BaseException], None]


class State(TypedDict):
    """What the lifespan gives to every request."""

    door: Door


def build(
    gateway: GatewaySettings,
    models: ModelSettings,
    triton: TritonSettings,
    on_fatal: OnFatal,
    *,
    keys: Keys | None = None,
    jobs: JobsSettings | None = None,
    stores: Stores | None = None,
) -> FastAPI:
    """Return the app. ``on_fatal`` is told when it cannot go on (a model's config is wrong); it has to end the process.

    Without ``keys`` the door is open. Jobs are kept where ``jobs`` says, or in ``stores``, whose opener closes them.
    ``app.state.stop_waiting`` ends what waits for jobs. Raises ConfigError.
    """
    opening = Phase("open")
    metrics = Metrics(gateway.demand_window_s)
    keys = Keys() if keys is None else keys
    metrics.watch_keys(lambda: keys.is_stale)
    limits = RateLimits(gateway.limits_storage_url)
    waiters = Waiters()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[State]:
        async with AsyncExitStack() as stack:
            stack.enter_context(_reading_again(keys))
            executor = stack.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="offload"))
            asyncio.get_running_loop().set_default_executor(executor)
            client = await stack.enter_async_context(TritonClient(triton))
            registry = Registry(client, models, triton)
            metrics.demand.know(lambda: registry.expected)
            await stack.enter_async_context(_following(registry, on_fatal))
            predictor = Predictor(gateway, models.default, registry, Pipeline(client), metrics)
            stack.push_async_callback(predictor.close)
            bodies = BodyReader(gateway, ByteBudget(gateway.max_buffered_bytes, metrics))
            job_door = None
            if jobs is not None and with_jobs:
                try:
                    opened = stores or await _open_stores(stack, jobs)
                    job_door = await _job_door(stack, gateway, jobs, opened, registry, waiters, metrics)
                except ConfigError as exc:  # told in one line: an app that fails to start would show a traceback
                    on_fatal(exc)
            door = Door(gateway, registry, predictor, bodies, limits, metrics, job_door)
            metrics.watch_dependencies(door.dependencies)
            opening.done()
            yield {"door": door}

    with_jobs = jobs is not None and (jobs.enabled or stores is not None)
    workers = _WORKERS + (_JOB_WORKERS if with_jobs else 0)
    app = _framework(lifespan)
    app.short = Envelope(Gate(predict_app(metrics), keys), metrics, _label(with_jobs))
    app.long = Envelope(app.framework, metrics, _label(with_jobs))
    app.state.stop_waiting = waiters.stop
    app.state.metrics = metrics
    app.include_router(routes.router)
    if with_jobs:
        app.router.routes.extend(jobs_routes.ROUTES)
    _add_plain_routes(app, with_jobs)
    app.router.routes.append(WebSocketRoute(STREAM, Stream(gateway, metrics)))
    problems.install(app, metrics)
    app.add_middleware(Gate, keys=keys)
    return app


def _framework(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[State]]) -> DoorApp:
    """The framework's own documentation pages load their scripts from elsewhere, and its own spans hold the query, so
    ``?text=``: ours do neither."""
    return DoorApp(
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        title="Twodoor",
        version="1",
        description="The interactive door, and the job API.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )


async def _open_stores(stack: AsyncExitStack, jobs: JobsSettings) -> Stores:
    return Stores(await stack.enter_async_context(open_ledger(jobs)), open_objects(jobs))


async def _job_door(
    stack: AsyncExitStack,
    gateway: GatewaySettings,
    jobs: JobsSettings,
    stores: Stores,
    registry: Registry,
    waiters: Waiters,
    metrics: Metrics,
) -> JobDoor:
    return JobDoor(
        gateway=gateway,
        settings=jobs,
        registry=registry,
        ledger=stores.ledger,
        objects=stores.objects,
        intake=JobIntake(stores.ledger, stores.objects, jobs),
        # A budget of its own: large bodies that wait for a slow store must not turn `/predict` away.
        bodies=BodyReader(gateway, ByteBudget(gateway.max_buffered_bytes, metrics)),
        uploads=Uploads(gateway, metrics),
        downloads=Downloads(metrics),
        waiters=waiters,
        health=await stack.enter_async_context(following(stores)),
    )


@contextmanager
def _reading_again(keys: Keys) -> Iterator[None]:
    """Let SIGHUP read the keys again, in the loop: a handler in the middle of a log line could not log."""
    if keys.path is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, keys.reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _label(with_jobs: bool) -> Callable[[str], str]:
    """Return the function path → the route's name in metrics: templates, and nothing a caller has made up."""
    paths = frozenset(_PLAIN) | {"/predict", "/openapi.json", STREAM}

    def label(path: str) -> str:
        if path in paths:
            return path
        return (jobs_routes.label_of(path) if with_jobs else None) or "other"

    return label


_PLAIN = {
    "/healthz": routes.healthz,
    "/readyz": routes.readyz,
    "/metrics": routes.metrics,
    "/docs": routes.docs,
}


def _add_plain_routes(app: FastAPI, with_jobs: bool) -> None:
    """Add the routes that take GET and HEAD and nothing else."""

    async def openapi(request: Request) -> Response:
        return JSONResponse(document(app, with_jobs))

    for path, endpoint in {**_PLAIN, "/openapi.json": openapi, STREAM: upgrade_required}.items():
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
