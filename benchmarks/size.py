"""``python -m benchmarks.size``: jobs of a hundred thousand and a million rows; only the model is fake.

It answers at once, so that what is left is Twodoor's own: rows a second, each process' memory, ledger statements for a
chunk, the time from the last row to the end, and the tables' size after everything was deleted.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from benchmarks.corpus import sst2_texts
from benchmarks.job_door import JobDriver
from local_stack.stack import Stack
from tests.stubs import STUB, WORDS, write_repository

SIZES = (100_000, 1_000_000)
SAMPLE_S = 0.5
RETAINED_S = 120.0
MIB = 2**20
TABLES_BYTES = (
    "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = 'twodoor' AND c.relkind = 'r'"
)
# The database itself notes when the last chunk of a job became done.
NOTE_DONE = """
CREATE TABLE public.last_done (job_id text PRIMARY KEY, at timestamptz NOT NULL);
CREATE FUNCTION public.note_done() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.last_done VALUES (NEW.job_id, clock_timestamp())
    ON CONFLICT (job_id) DO UPDATE SET at = excluded.at;
    RETURN NEW;
END $$;
CREATE TRIGGER note_done AFTER UPDATE ON twodoor.chunks FOR EACH ROW WHEN (NEW.done) EXECUTE FUNCTION public.note_done();
"""
CLOSING_MS = (
    "SELECT 1000 * extract(epoch FROM j.finished_at - d.at) FROM twodoor.jobs j JOIN public.last_done d ON d.job_id = j.id "
    "WHERE j.id = %s"
)


@dataclass(slots=True)
class Result:
    """One size's figures."""

    rows: int
    rows_per_s: float = 0.0
    upload_s: float = 0.0
    closing_s: float = 0.0
    chunks: int = 0
    statements: int = 0
    tables_before: int = 0
    tables_full: int = 0
    tables_after: int = 0
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Process → resident bytes before and at most."""


def main() -> int:
    """Run each size on one stack, the smaller one first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=SIZES, help="sizes, in rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="twodoor-size-") as folder:
        repository = write_repository(Path(folder) / "repository", models=())
        environment = {"TWODOOR_MODELS_DEFAULT": STUB}
        with Stack(Path(folder) / "home", repository=repository, environment=environment) as stack:
            return asyncio.run(_measure(stack, list(options.rows)))


async def _measure(stack: Stack, sizes: list[int]) -> int:
    # The stub takes certain words as orders to fail.
    texts = tuple(text for text in sst2_texts(2_000).texts if not any(word in text for word in WORDS.values()))
    results = []
    with psycopg.connect(stack.database_url, autocommit=True) as connection:
        connection.execute(NOTE_DONE)
    async with JobDriver(stack.gateway_url, STUB) as jobs:
        warm = await jobs.run(texts, 5_000, 120)
        await jobs.delete(warm.id)
        for rows in sizes:
            results.append(await _one(stack, jobs, texts, rows))
            _print(results[-1])
        for fault, count in jobs.wrong.items():
            print(f"wrong: {count} x {fault}")
    if len(results) > 1:
        _print_growth(results[0], results[-1])
    return 1 if jobs.wrong else 0


async def _one(stack: Stack, jobs: JobDriver, texts: tuple[str, ...], rows: int) -> Result:
    result = Result(rows)
    result.tables_before = _number(stack, TABLES_BYTES)
    memory = _Memory(stack)
    sampling = asyncio.create_task(memory.watch())
    before = _statements(stack)
    run = await jobs.run(texts, rows, rows / 100 + 300)
    sampling.cancel()
    await asyncio.wait([sampling])
    result.memory = memory.spans()
    result.rows_per_s, result.upload_s = run.rows_per_s, run.accepted_s - run.begin_s
    result.statements = _statements(stack) - before
    result.chunks = _number(stack, "SELECT count(*) FROM twodoor.chunks WHERE job_id = %s", run.id)
    result.closing_s = _number(stack, CLOSING_MS, run.id) / 1000
    result.tables_full = _number(stack, TABLES_BYTES)
    await jobs.check(run)
    await jobs.delete(run.id)
    result.tables_after = await _after_retention(stack)
    return result


class _Memory:
    """Resident memory of every service, from time to time."""

    def __init__(self, stack: Stack) -> None:
        self._pids = {name: stack.pid(name) for name in stack.status()}
        self._first: dict[str, int] = self._read()
        self._most = dict(self._first)

    def _read(self) -> dict[str, int]:
        """A service's memory is that of its whole process tree: PostgreSQL and Triton work in children."""
        return {name: sum(p.memory_info().rss for p in _tree(pid)) for name, pid in self._pids.items()}

    async def watch(self) -> None:
        """Look again and again until cancelled."""
        while True:
            for name, now in self._read().items():
                self._most[name] = max(self._most[name], now)
            await asyncio.sleep(SAMPLE_S)

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return name → resident bytes at first and at most."""
        return {name: (self._first[name], most) for name, most in self._most.items()}


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _number(stack: Stack, sql: str, *values: object) -> int:
    with psycopg.connect(stack.database_url, autocommit=True) as connection:
        row = connection.execute(sql, values).fetchone()
    return int(row[0] or 0) if row else 0


def _statements(stack: Stack) -> int:
    """Return how many transactions the database has ended; each of the ledger's methods is one."""
    return _number(stack, "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()")


async def _after_retention(stack: Stack) -> int:
    """Wait until the deleted job's objects are gone (its chunks went with it), let the database tidy up, and measure its tables."""
    ends = time.monotonic() + RETAINED_S
    while _number(stack, "SELECT count(*) FROM twodoor.garbage") and time.monotonic() < ends:  # noqa: ASYNC110 (asked by SQL)
        await asyncio.sleep(SAMPLE_S)
    with psycopg.connect(stack.database_url, autocommit=True) as connection:
        # What autovacuum does by itself a minute later.
        connection.execute("VACUUM")
    return _number(stack, TABLES_BYTES)


def _print(result: Result) -> None:
    spans = ", ".join(f"{name} {first // MIB} → {most // MIB}" for name, (first, most) in result.memory.items())
    print(
        f"{result.rows:,} rows: {result.rows_per_s:.0f} rows/s, upload {result.upload_s:.1f} s, {result.chunks} chunks, "
        f"{result.statements / max(1, result.chunks):.1f} ledger transactions a chunk, "
        f"{result.closing_s:.2f} s from the last row to completed; tables {result.tables_before / MIB:.1f} MiB before, "
        f"{result.tables_full / MIB:.1f} full, {result.tables_after / MIB:.1f} after retention; memory, MiB: {spans}",
        flush=True,
    )


def _print_growth(small: Result, large: Result) -> None:
    times = large.rows / small.rows
    cost = small.rows_per_s / large.rows_per_s
    per_chunk: Mapping[str, Any] = {
        "time for a row": cost,
        "statements for a chunk": (large.statements / large.chunks) / (small.statements / small.chunks),
    }
    print(f"{times:g} times the rows: " + ", ".join(f"{name} x {value:.2f}" for name, value in per_chunk.items()))


if __name__ == "__main__":
    sys.exit(main())
