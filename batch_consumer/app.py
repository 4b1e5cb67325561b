"""Opens the consumer's resources in order, runs its loops, and closes everything in reverse."""

import asyncio
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import structlog

from batch_consumer.broker import Broker
from batch_consumer.facts import TopicFacts
from batch_consumer.health import HealthServer, make_app
from batch_consumer.job_side import JobSide, open_job_side
from batch_consumer.lane import Lane
from batch_consumer.log_once import quieten
from batch_consumer.metrics import Metrics
from batch_consumer.owned import Parts
from batch_consumer.topic import TopicDoor
from batch_consumer.watchdog import Sight, Watchdog, watch
from serving.pipeline import Pipeline
from serving.registry import Registry
from serving.settings import ConsumerSettings, JobsSettings, KafkaSettings, ModelSettings, TritonSettings
from serving.triton_client import TritonClient

log = structlog.get_logger(__name__)

WATCH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class AllSettings:
    """Everything the process reads from its environment."""

    models: ModelSettings
    triton: TritonSettings
    kafka: KafkaSettings
    consumer: ConsumerSettings
    jobs: JobsSettings


async def run(settings: AllSettings) -> None:
    """Work until SIGTERM or SIGINT, then drain. Raises ConfigError where the operator has to change something."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_unread)
    quieten(logging.getLogger("aiokafka"))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(TritonClient(settings.triton))
        broker = Broker(settings.kafka, settings.consumer)
        stack.push_async_callback(broker.close)
        await _run_loops(settings, client, broker, stop, stack)
    log.info("consumer stopped")


async def _run_loops(
    settings: AllSettings, client: TritonClient, broker: Broker, stop: asyncio.Event, stack: AsyncExitStack
) -> None:
    consumer, metrics = settings.consumer, Metrics()
    registry = Registry(client, settings.models, settings.triton)
    # Whether bulk is paused is asked for before the first row runs.
    lane = Lane(Pipeline(client), registry, consumer, metrics, paused=settings.jobs.enabled)
    metrics.watch(lane.waiting)
    facts = TopicFacts(settings.kafka, consumer, broker)
    parts = Parts(settings.kafka, consumer, broker, facts, lane, metrics, lambda: registry.names)
    topic = TopicDoor(parts)
    jobs = None
    if settings.jobs.enabled:
        jobs = await open_job_side(stack, settings.kafka, consumer, settings.jobs, broker, registry, lane, metrics)
    watchdog = Watchdog(consumer.stall_timeout_s, time.monotonic())

    def dependencies() -> Mapping[str, bool]:
        stores = jobs.dependencies() if jobs else {}
        return {"triton": registry.triton_up, "kafka": topic.is_up, **stores}

    metrics.watch_process(lambda: watchdog.stalled, lambda: lane.paused, dependencies)
    health = HealthServer(
        make_app(lambda: watchdog.stalled, dependencies, metrics.render), consumer.host, consumer.port
    )
    helpers = [
        asyncio.create_task(health.run_until_cancelled(), name="health"),
        asyncio.create_task(registry.run(), name="registry"),
        asyncio.create_task(lane.run(), name="lane"),
        asyncio.create_task(
            watch(watchdog, lambda: _sight(lane, topic, parts, jobs), topic.restart, WATCH_INTERVAL_S), name="watchdog"
        ),
    ]
    doors = [asyncio.create_task(topic.run(stop), name="topic door")]
    if jobs:
        helpers.append(asyncio.create_task(jobs.look(), name="look at objects"))
        doors += [asyncio.create_task(loop, name=name) for name, loop in jobs.doors(stop).items()]
    try:
        await _first_end(doors, helpers, stop)
    finally:
        await _end_all(doors, helpers, stop, consumer.drain_timeout_s)


def _sight(lane: Lane, topic: TopicDoor, parts: Parts, jobs: JobSide | None) -> Sight:
    """Return what the watchdog sees: anything that moves is progress, records and rows in the lane are lag."""
    progress, lag = lane.progress + parts.progress.records, topic.lag
    if jobs:
        progress += jobs.chunks.progress
        lag = (lag or 0) + jobs.chunks.rows_in_lane if lag is not None or jobs.chunks.rows_in_lane else None
    return Sight(progress, lag, lane.waits_for_model() and not lane.has_work(), topic.reads_nothing)


async def _first_end(
    doors: "Sequence[asyncio.Task[None]]", helpers: "Sequence[asyncio.Task[None]]", stop: asyncio.Event
) -> None:
    """Return when ``stop`` is set and a door has ended in order; raise what ended any of them otherwise."""
    done, _ = await asyncio.wait([*doors, *helpers], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        if task in helpers or not stop.is_set():
            raise RuntimeError(f"{task.get_name()} ended by itself")


async def _end_all(
    doors: "Sequence[asyncio.Task[None]]",
    helpers: "Sequence[asyncio.Task[None]]",
    stop: asyncio.Event,
    drain_timeout_s: float,
) -> None:
    """Drain the doors while the lane still works, then end the loops in reverse; errors of the first were raised before."""
    stop.set()
    await asyncio.wait(doors, timeout=drain_timeout_s)
    for task in doors:
        task.cancel()
    await asyncio.wait(doors, timeout=drain_timeout_s)
    for task in reversed(helpers):
        task.cancel()
        await asyncio.wait([task], timeout=drain_timeout_s)
    for task in [*doors, *helpers]:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            log.error("ended with an error", task=task.get_name(), error=repr(error))


def _log_unread(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no task awaited. aiokafka leaves errors of a fenced producer in futures of its own."""
    error = context.get("exception")
    log.warning("background error", message=context.get("message"), error=repr(error) if error else None)
