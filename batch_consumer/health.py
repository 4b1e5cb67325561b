"""Health and metrics of the consumer over HTTP: alive, ready, and what Prometheus reads."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.errors import ConfigError


def make_app(
    is_stalled: Callable[[], bool], dependencies: Callable[[], Mapping[str, bool]], metrics: Callable[[], bytes]
) -> Starlette:
    """Return the application. A dependency that is down never fails /readyz: the work waits and resumes by itself."""

    async def healthz(_: Request) -> Response:
        stalled = is_stalled()
        return JSONResponse({"status": "stalled" if stalled else "ok"}, 503 if stalled else 200)

    async def readyz(_: Request) -> Response:
        states = {name: "up" if is_up else "down" for name, is_up in dependencies().items()}
        return JSONResponse({"dependencies": states})

    async def show_metrics(_: Request) -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", show_metrics)],
    )


class HealthServer(uvicorn.Server):
    """uvicorn without its own signal handlers: stopping is the application's business."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._address = f"{host}:{port}"

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def run_until_cancelled(self) -> None:
        """Serve; raises ConfigError where the port cannot be bound."""
        serving = asyncio.create_task(self._serve_or_explain(), name="health server")
        try:
            await asyncio.shield(serving)
        finally:
            self.should_exit = True
            await asyncio.wait([serving], timeout=3)

    async def _serve_or_explain(self) -> None:
        try:
            await self.serve()
        except SystemExit:
            # uvicorn's way of saying that the port is taken.
            raise ConfigError(
                f"cannot listen on {self._address}: set TWODOOR_CONSUMER_HOST or TWODOOR_CONSUMER_PORT"
            ) from None
