"""The services of the local stack as specs: how each is started and asked whether it is well."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from aiokafka.errors import KafkaError

from local_stack import kafka, postgres, triton
from local_stack.ask import client, status_of
from local_stack.config import StackConfig, consumer_index, stack_environment
from local_stack.kafka.topics import answers, ensure_topics
from local_stack.ports import LOOPBACK
from local_stack.postgres import database, sessions
from local_stack.service import Spec, Unhealthy
from local_stack.triton.health import ModelKeeper, TritonApi, first_line
from local_stack.triton.loading import Loading

# Kafka and Postgres give way to the interactive door, and so does a consumer. It would do so by itself, but too late for
# threads that its libraries start: a nice value belongs to a thread.
STORE_NICE = 5


def specs(config: StackConfig, http: httpx.AsyncClient, report: Callable[[str], None]) -> list[Spec]:
    """Return the specs of all configured services in the order they start."""
    made = []
    for name in config.names:
        if name == "postgres":
            made.append(postgres_spec(config))
        elif name == "kafka":
            made.append(kafka_spec(config))
        elif name == "triton":
            made.append(triton_spec(config, report))
        else:
            made.append(door_spec(config, name, http))
    return made


def postgres_spec(config: StackConfig) -> Spec:
    """The ledger's server: ready when our database is there and has the newest schema."""
    stack = config.stack
    migrated = False

    async def ready() -> bool:
        nonlocal migrated
        name = await database.ensure_database(stack)
        if name is None:
            return False
        if not migrated:
            # Once in the life of a supervisor: a server that is started again has what it had.
            if problem := await database.migrate(postgres.url(stack, database=name)):
                raise Unhealthy(problem)
            migrated = await database.publish(stack, name)
        return migrated

    async def alive() -> bool | None:
        return True if await database.answers(stack) else None

    def cleanup() -> None:
        postgres.end_leftovers(stack)

    return Spec(
        name="postgres",
        address=config.address("postgres"),
        command=lambda: postgres.command(stack),
        ready=ready,
        alive=alive,
        nice=STORE_NICE,
        prepare=lambda: postgres.prepare(stack),
        cleanup=cleanup,
        care=lambda pid: sessions.keep_nice(pid, STORE_NICE),
        as_owner_of=postgres.data_folder(stack),
        # At once, whoever is connected: the doors find it again by themselves.
        stop_signal=signal.SIGINT,
    )


def kafka_spec(config: StackConfig) -> Spec:
    """The broker: ready when it answers and our topics are there."""
    address = config.address("kafka")

    async def ready() -> bool:
        if not await answers(address):
            return False
        try:
            await ensure_topics(address, config.kafka)
        except (KafkaError, OSError, TimeoutError):
            return False
        return True

    async def alive() -> bool | None:
        return True if await answers(address) else None

    return Spec(
        name="kafka",
        address=address,
        command=lambda: kafka.command(config),
        ready=ready,
        alive=alive,
        nice=STORE_NICE,
        prepare=lambda: kafka.prepare(config),
    )


def triton_spec(config: StackConfig, report: Callable[[str], None]) -> Spec:
    """The model server: ready when it is live and every model either is ready or has said why not."""
    port = config.stack.triton_http_port
    loading = Loading(config.repository, config.models.default, staged=config.stack.triton_staged_load)

    async def ready() -> bool:
        try:
            async with client() as http:
                api = TritonApi(http, port)
                if not await api.live():
                    return False
                await loading.load_rest(api, config.stack.start_timeout_s)
                index = await api.index()
        except httpx.HTTPError:
            return False
        settled = {name: reason for name, (state, reason) in index.items() if state in ("READY", "UNAVAILABLE")}
        if not set(loading.names) <= set(settled):
            return False
        for name, (state, reason) in sorted(index.items()):
            if state == "UNAVAILABLE":
                report(f"{name}: does not load: {first_line(reason)}")
        return True

    async def alive() -> bool | None:
        async with client() as http:
            return True if await status_of(http, f"http://{LOOPBACK}:{port}/v2/health/live") == httpx.codes.OK else None

    return Spec(
        name="triton",
        address=config.address("triton"),
        command=lambda: triton.command(config, loading.begin()),
        ready=ready,
        alive=alive,
        environment=triton.Installation.find(config.stack.triton_venv).environment(),
        prepare=lambda: triton.prepare(config),
        cleanup=lambda: triton.clean_shared_memory(config),
        care=ModelKeeper(config, report).run,
    )


def door_spec(config: StackConfig, name: str, http: httpx.AsyncClient) -> Spec:
    """The gateway or one consumer: ready when ``/healthz`` says so, whatever the parts it uses do."""
    module = "gateway" if name == "gateway" else "batch_consumer"
    url = f"http://{config.address(name)}/healthz"
    environment = {**stack_environment(config), **config.extra}
    if name != "gateway":
        environment["TWODOOR_CONSUMER_PORT"] = str(config.consumer.port + consumer_index(name))
    # A path of the operator's own stays, behind ours.
    own = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), own]))

    async def ready() -> bool:
        return await status_of(http, url) == httpx.codes.OK

    async def alive() -> bool | None:
        status = await status_of(http, url)
        return None if status is None else status == httpx.codes.OK

    return Spec(
        name=name,
        address=config.address(name),
        command=lambda: [sys.executable, "-m", module],
        ready=ready,
        alive=alive,
        prepare=lambda: config.objects.mkdir(mode=0o700, parents=True, exist_ok=True),
        environment=environment,
        nice=0 if name == "gateway" else config.consumer.nice,
    )
