"""Ray Serve: a deployment whose replicas hold the model; batching by ``serve.batch``."""

import signal
import threading
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from benchmarks.peers.servers.common import Model, Settings, end_with_parent

SETTINGS = Settings.read()
# Twice the most callers there are: nothing is refused.
MAX_ONGOING = 256
# Ray's own health route answers in chunks, which our callers do not read.
HEALTHY = JSONResponse({"status": "ok"})


class OneByOne:
    """A call has one text."""

    def __init__(self) -> None:
        self.model = Model(SETTINGS)

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer a request."""
        if request.method == "GET":
            return HEALTHY
        return JSONResponse(self.model.answer([(await request.json())["text"]])[0])


class Batched:
    """Ray Serve collects the texts of several calls."""

    def __init__(self) -> None:
        self.model = Model(SETTINGS)

    @serve.batch(max_batch_size=SETTINGS.max_batch, batch_wait_timeout_s=SETTINGS.max_wait_s)
    async def answer(self, texts: list[str]) -> list[dict[str, Any]]:
        """Answer a batch."""
        return self.model.answer(texts)

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer a request."""
        if request.method == "GET":
            return HEALTHY
        return JSONResponse(await self.answer((await request.json())["text"]))


def main() -> None:
    """Serve until SIGTERM."""
    end_with_parent()
    ray.init(
        num_cpus=SETTINGS.processes,
        include_dashboard=False,
        object_store_memory=128 * 2**20,
        configure_logging=False,
        _node_ip_address=SETTINGS.host,
        _temp_dir=SETTINGS.home,
        runtime_env={"env_vars": {"PEER_SETTINGS": SETTINGS.text()}},
    )
    serve.start(http_options={"host": SETTINGS.host, "port": SETTINGS.port})
    deployment: Any = serve.deployment(
        Batched if SETTINGS.batching else OneByOne,
        name="sentiment",
        num_replicas=SETTINGS.processes,
        max_ongoing_requests=MAX_ONGOING,
        logging_config={"enable_access_log": False},
    )
    serve.run(deployment.bind(), route_prefix="/predict", logging_config={"enable_access_log": False})
    stop = threading.Event()
    # After ray.init, which sets handlers of its own.
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
