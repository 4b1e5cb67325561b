"""Opens the consumer's resources in order, runs its loops, and closes everything in reverse."""

import asyncio
import logging
import signal
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import structlog

from batch_consumer.broker import Broker
from batch_consumer.facts import TopicFacts
from batch_consumer.health import HealthServer, make_app
from batch_consumer.lane import Lane
from batch_consumer.log_once import quieten
from batch_consumer.metrics import Metrics
from batch_consumer.owned import Parts
from batch_consumer.topic import TopicDoor
from batch_consumer.watchdog import Sight, Watchdog, watch
from serving.pipeline import Pipeline
from serving.registry import Registry
from serving.settings import ConsumerSettings, KafkaSettings, ModelSettings, TritonSettings
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
        await _run_loops(settings, client, broker, stop)
    log.info("consumer stopped")


async def _run_loops(settings: AllSettings, client: TritonClient, broker: Broker, stop: asyncio.Event) -> None:
    consumer, metrics = settings.consumer, Metrics()
    registry = Registry(client, settings.models, settings.triton)
    lane = Lane(Pipeline(client), registry, consumer, metrics)
    metrics.watch(lane.waiting)
    facts = TopicFacts(settings.kafka, consumer, broker)
    parts = Parts(settings.kafka, consumer, broker, facts, lane, metrics, lambda: registry.names)
    topic = TopicDoor(parts)
    watchdog = Watchdog(consumer.stall_timeout_s, time.monotonic())

    def dependencies() -> Mapping[str, bool]:
        return {"triton": registry.triton_up, "kafka": topic.is_up}

    def see() -> Sight:
        progress = lane.progress + parts.progress.records
        return Sight(progress, topic.lag, lane.waits_for_model() and not lane.has_work(), topic.reads_nothing)

    health = HealthServer(
        make_app(lambda: watchdog.stalled, dependencies, metrics.render), consumer.host, consumer.port
    )
    helpers = [
        asyncio.create_task(health.run_until_cancelled(), name="health"),
        asyncio.create_task(registry.run(), name="registry"),
        asyncio.create_task(lane.run(), name="lane"),
        asyncio.create_task(watch(watchdog, see, topic.restart, WATCH_INTERVAL_S), name="watchdog"),
    ]
    door = asyncio.create_task(topic.run(stop), name="topic door")
    try:
        await _first_end(door, helpers)
    finally:
        await _end_all(door, helpers, stop, consumer.drain_timeout_s)


async def _first_end(door: "asyncio.Task[None]", helpers: "list[asyncio.Task[None]]") -> None:
    """Return when the topic door has ended in order; raise what ended any of them otherwise."""
    done, _ = await asyncio.wait([door, *helpers], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        if task is not door:
            raise RuntimeError(f"{task.get_name()} ended by itself")


async def _end_all(
    door: "asyncio.Task[None]", helpers: "list[asyncio.Task[None]]", stop: asyncio.Event, drain_timeout_s: float
) -> None:
    """Drain the door while the lane still works, then end the loops in reverse; their errors were raised before."""
    stop.set()
    await asyncio.wait([door], timeout=drain_timeout_s)
    for task in [door, *reversed(helpers)]:
        task.cancel()
        await asyncio.wait([task], timeout=drain_timeout_s)
    await asyncio.gather(*(task for task in [door, *helpers] if task.done()), return_exceptions=True)


def _log_unread(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no task awaited. aiokafka leaves errors of a fenced producer in futures of its own."""
    error = context.get("exception")
    log.warning("background error", message=context.get("message"), error=repr(error) if error else None)
