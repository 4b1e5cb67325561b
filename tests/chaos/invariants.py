"""What must hold after every round, looked at from outside: through HTTP, a plain Kafka reader, SQL and the object store."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx
import psycopg

from tests.chaos.arena import Arena
from tests.chaos.load import Load, SentJob
from tests.chaos.texts import Answers, Line
from tests.e2e.topics import read_results

SWEPT_S = 30.0
POLL_S = 0.3
_ENDED = ("completed", "failed", "cancelled", "expired")


async def check(arena: Arena, load: Load, end_s: float) -> list[str]:
    """Return what is broken after a round, one sentence each; all must have ended ``end_s`` after the last fault."""
    broken = list(load.wrong)
    broken += await _jobs(arena, load, end_s)
    broken += await _records(arena, load, end_s)
    broken += await _ledger(arena)
    broken += await _orphans(arena)
    return broken


# -- jobs -----------------------------------------------------------------------------------------------------------------


async def _jobs(arena: Arena, load: Load, end_s: float) -> list[str]:
    """Every accepted job has ended, with one right line for each row, and says so in its counts."""
    ends = time.monotonic() + end_s
    broken: list[str] = []
    async with httpx.AsyncClient(base_url=arena.stack.gateway_url, timeout=30, trust_env=False) as client:
        for sent in load.jobs:
            job = await _ended(client, sent.id, ends)
            if job is None:
                broken.append(f"job {sent.id} had not ended {end_s:g} s after the last fault")
                continue
            reply = await client.get(f"/v1/jobs/{sent.id}/results")
            if reply.status_code != 200:
                broken.append(f"results of job {sent.id}: {reply.status_code} {reply.text[:200]}")
                continue
            broken += [f"job {sent.id}: {problem}" for problem in compare(job, reply.content, sent, load.answers)]
    return broken


async def _ended(client: httpx.AsyncClient, job_id: str, ends: float) -> Mapping[str, Any] | None:
    while time.monotonic() < ends:
        reply = await client.get(f"/v1/jobs/{job_id}")
        if reply.status_code == 200 and reply.json()["status"] in _ENDED:
            job: Mapping[str, Any] = reply.json()
            return job
        await asyncio.sleep(POLL_S)
    return None


def compare(job: Mapping[str, Any], content: bytes, sent: SentJob, answers: Answers) -> Iterable[str]:
    """Yield what is wrong with an ended job: its status, a line too many, too few or wrong, its counts."""
    if job["status"] != "completed":
        yield f"ended as {job['status']}: {job.get('error')}"
        return
    results = [json.loads(line) for line in content.split(b"\n")[:-1]]
    if [result["index"] for result in results] != list(range(len(sent.lines))):
        yield f"{len(results)} lines for {len(sent.lines)} rows, or not in row order"
        return
    for number, (line, result) in enumerate(zip(sent.lines, results, strict=True)):
        if problem := _wrong(line, result, answers):
            yield f"row {number}: {problem}"
    failed = sum("error" in result for result in results)
    counts = {"total": len(results), "succeeded": len(results) - failed, "failed": failed, "pending": 0}
    if job["rows"] != counts:
        yield f"the job counts {job['rows']}, its results {counts}"


def _wrong(line: Line, result: Mapping[str, Any], answers: Answers) -> str | None:
    if line.error is not None:
        code = result.get("error", {}).get("code")
        return None if code == line.error else f"expected the error {line.error}: {result}"
    if "error" in result:
        return f"a healthy row got an error: {result}"
    if result.get("id") != line.id or line.sentence is None or not answers.is_right(line.sentence, result["output"]):
        return f"not the row's own answer: {result}"
    return None


# -- records --------------------------------------------------------------------------------------------------------------


async def _records(arena: Arena, load: Load, end_s: float) -> list[str]:
    """Each record that Kafka acknowledged has exactly one result, the right one, in offset order per partition."""
    ids = set(load.records)
    try:
        found = await read_results(arena.stack.kafka, arena.results_from, ids, end_s)
    except AssertionError as error:
        return [str(error)]
    broken = []
    counts = Counter(read.value["id"] for read in found)
    broken += [f"record {name} has {count} results" for name, count in counts.items() if count != 1]
    by_source: dict[int, list[int]] = {}
    for read in sorted(found, key=lambda read: (read.partition, read.offset)):
        by_source.setdefault(read.value["source"]["partition"], []).append(read.value["source"]["offset"])
        sentence = load.records[read.value["id"]]
        if "output" not in read.value or not load.answers.is_right(sentence, read.value["output"]):
            broken.append(f"record {read.value['id']} got {read.value}")
    broken += [
        f"results of partition {p} are out of order" for p, offsets in by_source.items() if offsets != sorted(offsets)
    ]
    return broken


# -- what is kept -----------------------------------------------------------------------------------------------------------


async def _ledger(arena: Arena) -> list[str]:
    """No chunk is leased by the dead, none became done twice or under another's claim, and the counts are the chunks'."""
    return [sentence for sql, sentence in LEDGER if await _rows(arena, sql)]


async def _rows(arena: Arena, sql: str) -> Sequence[Mapping[str, Any]]:
    ends = time.monotonic() + SWEPT_S
    while True:
        try:
            rows = await asyncio.to_thread(arena.query, sql)
        except psycopg.OperationalError:
            rows = [{}]
        if not rows or time.monotonic() > ends:
            return rows
        await asyncio.sleep(POLL_S)


LEDGER = (
    (
        (
            "SELECT 1 FROM twodoor.chunks c JOIN twodoor.jobs j ON j.id = c.job_id WHERE c.lease_until > now() "
            "AND NOT c.done AND NOT EXISTS (SELECT 1 FROM twodoor.consumers k WHERE k.id = c.consumer "
            "AND k.seen_at > now() - interval '10 seconds')"
        ),
        "a chunk is leased by a consumer that is gone",
    ),
    (
        "SELECT 1 FROM public.chaos_done GROUP BY job_id, number HAVING count(*) > 1",
        "a chunk became done twice",
    ),
    (
        "SELECT 1 FROM public.chaos_done WHERE part_key NOT LIKE '%%' || claim",
        "a chunk became done under a claim that was not its current one",
    ),
    (
        (
            "SELECT 1 FROM twodoor.jobs j JOIN (SELECT job_id, sum(succeeded) AS good, sum(failed) AS bad "
            "FROM twodoor.chunks GROUP BY job_id) c ON c.job_id = j.id WHERE j.finished_at IS NOT NULL "
            "AND j.deleted_at IS NULL AND (j.rows_succeeded <> c.good OR j.rows_failed <> c.bad)"
        ),
        "a job's counts are not those of its chunks",
    ),
)


async def _orphans(arena: Arena) -> list[str]:
    """Every object belongs to a job, and every job's objects are there."""
    ends = time.monotonic() + SWEPT_S
    while True:
        orphans, missing = await _difference(arena)
        if not orphans or time.monotonic() > ends:
            break
        await asyncio.sleep(POLL_S)
    return [f"orphan {key}" for key in sorted(orphans)[:3]] + [
        f"object {key} is missing" for key in sorted(missing)[:3]
    ]


async def _difference(arena: Arena) -> tuple[set[str], set[str]]:
    stored = {info.key async for info in arena.objects().list("jobs/")}
    rows = await asyncio.to_thread(
        arena.query,
        "SELECT input_key AS key FROM twodoor.jobs WHERE deleted_at IS NULL UNION ALL "
        "SELECT part_key FROM twodoor.chunks WHERE done UNION ALL SELECT key FROM twodoor.uploads",
    )
    wanted = {row["key"] for row in rows}
    return stored - wanted, wanted - stored
