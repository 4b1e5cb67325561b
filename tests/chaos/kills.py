"""``python -m tests.chaos.kills``: one large job whose consumer is killed at random moments.

Prints rows, kills and the chunks that were begun again; the exit code is 1 where a row has not exactly one right line, or
more work was done twice than was leased at the kills.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psycopg

from local_stack.stack import Stack
from tests.chaos.arena import LEASE_S
from tests.chaos.invariants import compare
from tests.chaos.load import SentJob
from tests.chaos.texts import MODEL, Answers, job_lines

LIMIT_S = 900.0


def main() -> int:
    """Run it on a stack of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kills", description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    environment = {
        "TWODOOR_CONSUMER_LEASE_S": str(LEASE_S),
        "TWODOOR_CONSUMER_LEASE_RENEWAL_S": "0.5",
        "TWODOOR_STACK_RESTART_BACKOFF_MAX_S": "1",
    }
    with tempfile.TemporaryDirectory(prefix="twodoor-kills-") as home:
        services = ("postgres", "triton", "gateway", "consumer")
        with Stack(Path(home), services=services, environment=environment) as stack:
            return asyncio.run(_run(stack, options.rows, options.kills, random.Random(options.seed)))


async def _run(stack: Stack, rows: int, kills: int, dice: random.Random) -> int:
    answers = await asyncio.to_thread(Answers.ask, stack.gateway_url)
    lines = job_lines(dice, "k", rows)
    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=120, trust_env=False) as client:
        reply = await client.post(
            "/v1/jobs",
            params={"model": MODEL},
            content=b"".join(line.raw + b"\n" for line in lines),
            headers={"Content-Type": "application/jsonl"},
        )
        reply.raise_for_status()
        job_id = reply.json()["id"]
        leased = 0
        for done in sorted(dice.random() for _ in range(kills)):
            leased += await _kill_at(stack, client, job_id, int(done * rows * 0.95))
        job = await _end(client, job_id)
        content = (await client.get(f"/v1/jobs/{job_id}/results")).content
    broken = list(compare(job, content, SentJob(job_id, lines), answers))
    return _judge(stack, broken, rows, leased, kills)


async def _kill_at(stack: Stack, client: httpx.AsyncClient, job_id: str, rows: int) -> int:
    """Kill the consumer once so many rows are done; returns how many chunks it held at that moment."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        counts = (await client.get(f"/v1/jobs/{job_id}")).json()["rows"]
        if counts["succeeded"] + counts["failed"] >= rows:
            break
        await asyncio.sleep(0.1)
    pid = stack.pid("consumer")
    os.kill(pid, signal.SIGKILL)
    leased = _count(stack, "SELECT count(*) FROM twodoor.chunks WHERE NOT done AND token IS NOT NULL")
    await asyncio.to_thread(stack.wait_ready, "consumer", 60, pid)
    return leased


async def _end(client: httpx.AsyncClient, job_id: str) -> dict[str, object]:
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        job: dict[str, object] = (await client.get(f"/v1/jobs/{job_id}")).json()
        if job["status"] not in ("queued", "running"):
            return job
        await asyncio.sleep(0.2)
    raise TimeoutError(f"the job had not ended after {LIMIT_S:g} s")


def _judge(stack: Stack, broken: list[str], rows: int, leased: int, kills: int) -> int:
    again = _count(stack, "SELECT sum(generation) - count(*) FROM twodoor.chunks")
    chunks = _count(stack, "SELECT count(*) FROM twodoor.chunks")
    if again > leased:
        broken.append(f"{again} chunks were begun again, {leased} were leased at the kills")
    print(f"kills: {rows:,} rows in {chunks} chunks, {kills} kills, {leased} chunks leased then, {again} begun again")
    for sentence in broken[:10]:
        print(f"broken: {sentence}")
    print(f"kills: {'failed' if broken else 'ok'}")
    return 1 if broken else 0


def _count(stack: Stack, sql: str) -> int:
    with psycopg.connect(stack.database_url, autocommit=True) as connection:
        row = connection.execute(sql).fetchone()
    return int(row[0] or 0) if row else 0


if __name__ == "__main__":
    sys.exit(main())
