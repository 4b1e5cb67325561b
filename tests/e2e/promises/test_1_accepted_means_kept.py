"""Promise 1: an accepted row gives exactly one result, at either bulk entrance, whichever process is killed."""

import asyncio
import json
import os
import signal

import httpx

from local_stack.stack import Stack
from tests.e2e.topics import assert_each_once_in_order, produce, read_results, results_end
from tests.parts import wait_until

ROWS = 1_500


async def test_killing_every_part_in_turn_loses_and_doubles_nothing(stack: Stack) -> None:
    start = await results_end(stack.kafka)
    ids = {f"kept-{number}" for number in range(ROWS)}
    records = ({"id": f"kept-{n}", "model": "sentiment_model", "text": f"record {n} was kept"} for n in range(ROWS))
    await produce(stack.kafka, records)
    body = "".join(json.dumps({"id": f"row-{n}", "text": f"row {n} was kept"}) + "\n" for n in range(ROWS))
    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=30, trust_env=False) as client:
        reply = await client.post(
            "/v1/jobs?model=sentiment_model", content=body, headers={"Content-Type": "application/jsonl"}
        )
        assert reply.status_code == 202, reply.text
        path = reply.headers["location"]
    for names in (("consumer", "postgres"), ("triton", "kafka", "gateway"), ("consumer",)):
        pids = {name: stack.pid(name) for name in names}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        for name, pid in pids.items():
            await asyncio.to_thread(stack.wait_ready, name, 90, pid)
    found = await read_results(stack.kafka, start, ids, timeout_s=150)
    assert_each_once_in_order(found, ids)
    assert [read.value for read in found if "error" in read.value] == []
    await asyncio.to_thread(wait_until, lambda: _status(stack, path) == "completed", "the job is completed", 120)
    lines = httpx.get(f"{stack.gateway_url}{path}/results", timeout=30, trust_env=False).text.splitlines()
    results = [json.loads(line) for line in lines]
    assert [(result["index"], result["id"]) for result in results] == [(n, f"row-{n}") for n in range(ROWS)]
    assert [result for result in results if "output" not in result] == []


def _status(stack: Stack, path: str) -> str:
    return str(httpx.get(f"{stack.gateway_url}{path}", timeout=10, trust_env=False).json()["status"])
