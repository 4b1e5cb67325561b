"""The stores under the ledger's contract, each with a clock that a test can move, and what the tests say to them."""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
from pydantic import SecretStr

from jobs.ledger import Ledger, input_key, part_key
from jobs.memory import MemoryLedger
from jobs.postgres import open_ledger
from jobs.records import Accepted, ChunkPlan, Claim, Done, Job, NewJob
from serving.settings import JobsSettings

MODELS = {"m": ["1"]}
ROWS = 10
# Every moment in every table.
_MOMENTS = """
    SELECT format('UPDATE twodoor.%I SET %s', table_name,
                  string_agg(format('%1$I = %1$I - make_interval(secs => %%(s)s)', column_name), ', '))
    FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)
    WHERE table_schema = 'twodoor' AND data_type = 'timestamp with time zone' AND table_type = 'BASE TABLE'
    GROUP BY table_name
"""


@dataclass(frozen=True, slots=True)
class Store:
    """A ledger, and a way to let time pass for it."""

    ledger: Ledger
    advance: Callable[[float], Awaitable[None]]
    url: str = ""

    async def execute(self, statement: str) -> None:
        """Run a statement behind the ledger's back."""
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            await connection.execute(statement.encode())


class MovingClock:
    """A clock for the store in memory."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    async def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def memory_store() -> Store:
    clock = MovingClock()
    return Store(MemoryLedger(clock), clock.advance)


def jobs_settings(url: str, **more: Any) -> JobsSettings:
    return JobsSettings(database_url=SecretStr(url), objects_url="memory://", **more)


@asynccontextmanager
async def postgres_store(url: str, **settings: Any) -> AsyncIterator[Store]:
    """The real one; its clock cannot be moved, so every moment it keeps is moved into the past instead."""

    async def advance(seconds: float) -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            for (statement,) in await (await connection.execute(_MOMENTS)).fetchall():
                await connection.execute(statement, {"s": seconds})

    async with open_ledger(jobs_settings(url, **settings)) as ledger:
        yield Store(ledger, advance, url)


def new_job(rows: int = ROWS, **more: Any) -> NewJob:
    """A job of model ``m``, tenant ``default``, with an imported input (no upload) where nothing else is said."""
    job_id = f"job_{uuid4().hex}"
    given: dict[str, Any] = {
        "id": job_id, "tenant": "default", "weight": 1.0, "model": "m", "truncate": False, "metadata": {},
        "input_key": input_key(job_id), "input_bytes": 100 * rows, "has_lines": True, "row_count": rows,
        "completion_window_s": 3_600, "result_ttl_s": 7_200, "fingerprint": hashlib.sha256(b"body").digest(),
        "uploaded": False,
    }  # fmt: skip
    return NewJob(**(given | more))


def plans(rows: int, chunk_rows: int = ROWS) -> list[ChunkPlan]:
    """Chunks of 100 bytes a row."""
    return [
        ChunkPlan(100 * first, 100 * min(rows, first + chunk_rows), first, min(chunk_rows, rows - first), first + 1)
        for first in range(0, rows, chunk_rows)
    ]


async def accept(ledger: Ledger, chunks: int = 1, **more: Any) -> Job:
    """Accept a job of so many chunks of ROWS rows; returns it."""
    return (await submit(ledger, chunks, **more)).job


async def submit(ledger: Ledger, chunks: int = 1, **more: Any) -> Accepted:
    job = new_job(chunks * ROWS, **more)
    return await ledger.accept(job, plans(job.row_count))


async def claim(ledger: Ledger, consumer: str = "c1", lease_s: float = 60.0, **more: Any) -> Claim:
    """Claim a chunk; there has to be one."""
    found = await try_claim(ledger, consumer, lease_s, **more)
    assert found is not None
    return found


async def try_claim(
    ledger: Ledger, consumer: str = "c1", lease_s: float = 60.0, models: Any = None, full: Sequence[str] = ()
) -> Claim | None:
    return await ledger.claim(consumer, MODELS if models is None else models, full, lease_s)


def done(claim: Claim, failed: int = 0) -> Done:
    """What a consumer says of a finished chunk."""
    rows = claim.plan.row_count
    return Done(part_key(claim), rows - failed, failed, 50 * rows, 20 * failed)


async def work_off(ledger: Ledger, failed: int = 0) -> list[Claim]:
    """Claim and complete until nothing is left to claim."""
    finished = []
    while (found := await try_claim(ledger)) is not None:
        assert await ledger.complete(found, done(found, failed))
        finished.append(found)
    return finished


async def ended(ledger: Ledger, chunks: int = 1, **more: Any) -> Job:
    """Accept a job, work it off and close it."""
    job = await accept(ledger, chunks, **more)
    await work_off(ledger)
    closed = await ledger.close_due(100)
    assert job.id in [found.id for found in closed]
    return await ledger.get(job.tenant, job.id)
