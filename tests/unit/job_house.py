"""A consumer's job door with everything it needs in one process: a ledger and objects in memory that may go away, and a
model (the lane's ``World``) that fails as told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from batch_consumer.chunk_work import ChunkParts
from batch_consumer.chunks import ChunkDoor
from batch_consumer.lane import Lane
from batch_consumer.leases import Leases
from batch_consumer.metrics import Metrics
from jobs.forms import JobRequest
from jobs.intake import JobIntake, Submitter
from jobs.ledger import Ledger
from jobs.memory import MemoryLedger
from jobs.objects import Objects, memory_objects
from jobs.records import Job
from serving.errors import DependencyDown
from serving.settings import ConsumerSettings, JobsSettings

OFTEN: dict[str, Any] = {
    "claim_interval_ms": 10, "lease_renewal_s": 0.02, "retry_backoff_max_s": 0.02, "drain_timeout_s": 2.0,
}  # fmt: skip


class Flaky:
    """Passes every call on to a store; while ``is_away`` it raises DependencyDown instead, and counts what was asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.is_away = False
        self.away_for: set[str] = set()
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda name: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **more: Any) -> Any:
            self.before(name)
            self.calls.append(name)
            if self.is_away or name in self.away_for:
                raise DependencyDown("away")
            return await method(*args, **more)

        return call


class House:
    """One consumer over stores that several may share."""

    def __init__(
        self, world: Any, ledger: Any, objects: Any, consumer: str = "c1", registry: Any = None, **settings: Any
    ) -> None:
        registry = world if registry is None else registry
        self.settings = ConsumerSettings(**{**OFTEN, **settings})
        self.metrics = Metrics()
        self.ledger: Any = ledger
        self.objects: Any = objects
        self.lane = Lane(world, registry, self.settings, self.metrics)
        parts = ChunkParts(
            consumer, self.ledger, self.objects, self.lane, self.settings, self.metrics, lambda: registry.names
        )
        self.leases = Leases(consumer, self.ledger, self.lane, self.settings)
        self.door = ChunkDoor(parts, self.leases, registry)
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Work until ``stop``."""
        lane = asyncio.create_task(self.lane.run())
        try:
            await self.door.run(self.stop)
        finally:
            lane.cancel()
            await asyncio.wait([lane])

    @asynccontextmanager
    async def running(self) -> AsyncIterator["House"]:
        """Work in the background; stops in order at the end."""
        task = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            self.stop.set()
            await asyncio.wait_for(task, 10)

    def sample(self, name: str, **labels: str) -> float:
        """Return one metric, 0 where it does not exist."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def stores() -> tuple[Flaky, Flaky]:
    """Return a ledger and objects in memory that may go away."""
    return Flaky(MemoryLedger()), Flaky(memory_objects())


async def submit(
    ledger: Ledger,
    objects: Objects,
    rows: Sequence[object] | bytes,
    tenant: Submitter | None = None,
    model: str = "m",
    chunk_rows: int = 32,
    **more: Any,
) -> Job:
    """Accept a job: of JSONL where ``rows`` are bytes, else of inputs."""
    settings = JobsSettings(chunk_rows=chunk_rows, max_row_bytes=2048)  # type: ignore[call-arg]
    intake = JobIntake(ledger, objects, settings)
    submitter = tenant or Submitter("default")
    if not isinstance(rows, bytes):
        return (await intake.submit(JobRequest(model, inputs=rows, **more), submitter)).job

    async def body() -> AsyncIterator[bytes]:
        yield rows

    return (await intake.submit(JobRequest(model, **more), submitter, body())).job


async def closed(ledger: Any, job: Job, timeout_s: float = 10.0) -> Job:
    """Close jobs, as the housekeeper does, until this one has ended."""
    async with asyncio.timeout(timeout_s):
        while True:
            await ledger.close_due(100)
            found: Job = await ledger.get(job.tenant, job.id)
            if found.status.ended:
                return found
            await asyncio.sleep(0.005)


async def result_lines(ledger: Any, objects: Any, job: Job, errors: bool = False) -> list[Mapping[str, Any]]:
    """Return the job's result lines in row order, or its error lines once more."""
    found = b""
    for part in await ledger.parts(job.tenant, job.id):
        data = await objects.get(part.key)
        assert len(data) == part.result_bytes + part.error_bytes
        found += data[part.result_bytes :] if errors else data[: part.result_bytes]
    return [json.loads(line) for line in found.decode().splitlines()]


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.003)
