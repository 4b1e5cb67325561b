"""What a consumer has only where jobs are kept: the ledger, the object store, chunks, the housekeeper, the jobs topic."""

import asyncio
import os
import socket
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack

from batch_consumer.broker import Broker
from batch_consumer.chunk_work import ChunkParts
from batch_consumer.chunks import ChunkDoor
from batch_consumer.events import Events
from batch_consumer.housekeeper import Housekeeper
from batch_consumer.jobs_topic import JobsTopic
from batch_consumer.lane import Lane
from batch_consumer.leases import Leases
from batch_consumer.metrics import Metrics
from jobs.intake import JobIntake
from jobs.ledger import Ledger
from jobs.objects import Objects, open_objects
from jobs.postgres import open_ledger
from serving.errors import DependencyDown
from serving.registry import Registry
from serving.settings import ConsumerSettings, JobsSettings, KafkaSettings

LOOK_INTERVAL_S = 2.0


class JobSide:
    """The loops of jobs and whether their stores are there."""

    def __init__(
        self,
        kafka: KafkaSettings,
        consumer: ConsumerSettings,
        jobs: JobsSettings,
        ledger: Ledger,
        objects: Objects,
        broker: Broker,
        registry: Registry,
        lane: Lane,
        metrics: Metrics,
    ) -> None:
        name = f"{socket.gethostname()[:48]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._objects = objects
        self.events = Events(kafka, consumer, broker)
        self._housekeeper = Housekeeper(name, ledger, objects, registry, self.events, consumer, jobs, metrics)
        self._topic = JobsTopic(kafka, consumer, jobs, JobIntake(ledger, objects, jobs), self.events, metrics)
        parts = ChunkParts(name, ledger, objects, lane, consumer, metrics, lambda: registry.names)
        self._leases = Leases(name, ledger, lane, consumer)
        self.chunks = ChunkDoor(parts, self._leases, registry, self._housekeeper.nudge)
        self._objects_up = False

    def doors(self, stop: asyncio.Event) -> Mapping[str, Coroutine[None, None, None]]:
        """Return the loops that end in order after ``stop``."""
        return {
            "chunk door": self.chunks.run(stop),
            "housekeeper": self._housekeeper.run(stop),
            "jobs topic": self._topic.run(stop),
        }

    def dependencies(self) -> Mapping[str, bool]:
        """Return which stores answered when they were asked last."""
        return {"postgres": self._leases.is_up, "objects": self._objects_up}

    async def look(self) -> None:
        """Ask the object store again and again whether it is there, until cancelled."""
        while True:
            try:
                await self._objects.ping()
                self._objects_up = True
            except DependencyDown:
                self._objects_up = False
            await asyncio.sleep(LOOK_INTERVAL_S)


async def open_job_side(
    stack: AsyncExitStack,
    kafka: KafkaSettings,
    consumer: ConsumerSettings,
    jobs: JobsSettings,
    broker: Broker,
    registry: Registry,
    lane: Lane,
    metrics: Metrics,
) -> JobSide:
    """Open the stores, which may be away, and make what works with them; ``stack`` closes it. Raises ConfigError."""
    ledger = await stack.enter_async_context(open_ledger(jobs))
    side = JobSide(kafka, consumer, jobs, ledger, open_objects(jobs), broker, registry, lane, metrics)
    stack.push_async_callback(side.events.close)
    return side
