"""What the tests of the housekeeper share: a clock to move, jobs at any stage, and a housekeeper that runs."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from batch_consumer.housekeeper import Housekeeper
from batch_consumer.metrics import Metrics
from jobs.ledger import Ledger, input_key, part_key
from jobs.objects import Objects
from jobs.records import ChunkPlan, Claim, Done, Job, NewJob, Notification
from serving.errors import DependencyDown
from serving.settings import ConsumerSettings, JobsSettings

MODEL, VERSION, ROWS = "m", "1", 4
SOURCE = {"topic": "twodoor.jobs", "partition": 0, "offset": 7}
CONSUMER: dict[str, Any] = {
    "duty_interval_s": 0.01, "retry_backoff_max_s": 0.05, "drain_timeout_s": 2, "kafka_timeout_s": 0.5,
}  # fmt: skip


class Clock:
    """The ledger's clock."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@dataclass
class Registry:
    """Triton as the housekeeper sees it."""

    ready: dict[str, tuple[str, ...]] = field(default_factory=lambda: {MODEL: (VERSION,)})
    triton_up: bool = True
    seen: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.seen.set()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.ready)

    def versions(self, name: str) -> tuple[str, ...]:
        return self.ready.get(name, ()) if self.triton_up else ()


class Told:
    """The events topic as a list; ``away`` while Kafka is."""

    def __init__(self) -> None:
        self.events: list[Notification] = []
        self.away = False

    async def connect(self) -> None:
        if self.away:
            raise DependencyDown("Kafka takes no events of jobs")

    async def announce(self, notifications: Sequence[Notification]) -> None:
        await self.connect()
        self.events += notifications

    def kinds(self) -> list[tuple[str, str]]:
        """(job, kind) as they came."""
        return [(event.job.id, event.kind) for event in self.events]


@dataclass
class House:
    """A ledger, objects, and what a housekeeper needs beside them."""

    ledger: Ledger
    objects: Objects
    registry: Registry = field(default_factory=Registry)
    told: Told = field(default_factory=Told)
    metrics: Metrics = field(default_factory=Metrics)

    async def upload(self, ttl_s: float = 60.0) -> str:
        """Begin an upload and write its object; returns the job's id to be."""
        job_id = f"job_{uuid.uuid4().hex}"
        await self.ledger.open_upload(job_id, "t", input_key(job_id), ttl_s)
        await self.objects.put(input_key(job_id), b'"a row"\n' * ROWS)
        return job_id

    async def accept(self, chunks: int = 1, model: str = MODEL, **more: Any) -> Job:
        """Accept a job of equal chunks, as if it had come by topic."""
        job_id = await self.upload()
        plans = [ChunkPlan(8 * ROWS * n, 8 * ROWS * (n + 1), ROWS * n, ROWS, ROWS * n + 1) for n in range(chunks)]
        defaults: dict[str, Any] = {"completion_window_s": 3600, "result_ttl_s": 3600}
        new = NewJob(
            id=job_id, tenant="t", weight=1.0, model=model, truncate=False, metadata={"k": "v"},
            input_key=input_key(job_id), input_bytes=8 * ROWS * chunks, has_lines=True, row_count=ROWS * chunks,
            fingerprint=b"f" * 32, request_id="req-1", source=SOURCE, **(defaults | more),
        )  # fmt: skip
        return (await self.ledger.accept(new, plans)).job

    async def claim(self, model: str = MODEL, lease_s: float = 30.0) -> Claim:
        """Claim the next chunk."""
        claim = await self.ledger.claim("worker", {model: (VERSION,)}, (), lease_s)
        assert claim is not None
        return claim

    async def put_part(self, claim: Claim) -> str:
        """Store a claim's result part."""
        await self.objects.put(part_key(claim), b"{}\n" * ROWS)
        return part_key(claim)

    async def work(self, claim: Claim) -> str:
        """Bring a claimed chunk to its end; returns the key of its part."""
        key = await self.put_part(claim)
        ran = claim.status.runs
        done = Done(key, ROWS if ran else 0, 0 if ran else ROWS, 3 * ROWS, 0 if ran else 3 * ROWS)
        assert await self.ledger.complete(claim, done)
        return key

    async def scene(
        self, let_leases_run_out: Callable[[], Awaitable[None]], lease_s: float
    ) -> tuple[set[str], set[str]]:
        """Store objects at every stage; returns the keys somebody may still need, and those nobody can."""
        needed = {input_key(await self.upload())}
        job = await self.accept(chunks=5)
        needed.add(input_key(job.id))
        needed.add(await self.work(await self.claim()))
        superseded, released = await self.claim(lease_s=lease_s), await self.claim(lease_s=lease_s)
        orphans = {await self.put_part(superseded), await self.put_part(released)}
        await self.ledger.release([released])
        await let_leases_run_out()
        # The two chunks again, then two more: one lives, one's lease runs out and nobody has taken it over.
        needed |= {await self.work(await self.claim()), await self.work(await self.claim())}
        needed.add(await self.put_part(await self.claim(lease_s=600)))
        needed.add(await self.put_part(await self.claim(lease_s=lease_s)))
        await let_leases_run_out()
        gone = await self.upload()
        assert await self.ledger.drop_upload(gone)
        return needed, orphans | {input_key(gone)}

    async def keys(self) -> set[str]:
        """Every stored object."""
        return {info.key async for info in self.objects.list("jobs/")}

    def make(self, jobs: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None) -> Housekeeper:
        """Make a housekeeper with fast settings."""
        return Housekeeper(
            f"c-{uuid.uuid4().hex[:4]}", self.ledger, self.objects, self.registry, self.told,
            ConsumerSettings(**(CONSUMER | (consumer or {}))), JobsSettings(**(jobs or {})), self.metrics,
        )  # fmt: skip


@asynccontextmanager
async def running(*housekeepers: Housekeeper) -> AsyncIterator[None]:
    """Let housekeepers work while the block runs; they must end in order."""
    stop = asyncio.Event()
    tasks = [asyncio.create_task(one.run(stop)) for one in housekeepers]
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> None:
    """Poll a condition, plain or asynchronous; fails with ``what``."""
    end_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert asyncio.get_running_loop().time() < end_s, f"{what}: not within {timeout_s:g} s"
        await asyncio.sleep(0.01)
