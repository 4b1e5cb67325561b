"""Promise 6: parts are replaced while callers keep coming: `/predict` needs Triton only, jobs the two stores, topics Kafka."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from local_stack.stack import Stack
from tests.e2e.topics import assert_each_once_in_order, produce, read_results, results_end


@asynccontextmanager
async def callers(stack: Stack, *, submissions: bool = False) -> AsyncIterator[Counter[int]]:
    """Four callers in a closed loop, and one who submits jobs; gives the statuses, complete when the block has ended."""
    statuses: Counter[int] = Counter()
    end = asyncio.Event()

    async def call(client: httpx.AsyncClient) -> None:
        while not end.is_set():
            reply = await client.post("/predict", json={"text": "still here"})
            statuses[reply.status_code] += 1
            if reply.status_code == 503:
                assert int(reply.headers["retry-after"]) >= 1
                await asyncio.sleep(0.1)

    async def submit(client: httpx.AsyncClient) -> None:
        while not end.is_set():
            reply = await client.post("/v1/jobs", json={"model": "sentiment_model", "inputs": ["still kept"] * 3})
            statuses[reply.status_code] += 1
            await asyncio.sleep(0.2)

    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=30, trust_env=False) as client:
        tasks = [asyncio.create_task(call(client)) for _ in range(4)]
        if submissions:
            tasks.append(asyncio.create_task(submit(client)))
        try:
            yield statuses
        finally:
            end.set()
            await asyncio.gather(*tasks)


async def test_replacing_the_consumer_and_kafka_is_nothing_a_caller_notices(stack: Stack) -> None:
    async with callers(stack, submissions=True) as statuses:
        await asyncio.to_thread(stack.restart, "consumer")
        await asyncio.to_thread(stack.restart, "kafka")
    assert statuses[200] > 0
    assert statuses[202] > 0
    assert set(statuses) == {200, 202}


async def test_without_postgres_calls_and_records_are_answered_and_submissions_are_told_to_come_back(
    stack: Stack,
) -> None:
    start = await results_end(stack.kafka)
    ids = {f"kafka-only-{number}" for number in range(60)}
    async with callers(stack) as statuses:
        await asyncio.to_thread(stack.stop_service, "postgres")
        try:
            await produce(stack.kafka, ({"id": one, "model": "sentiment_model", "text": one} for one in ids))
            found = await read_results(stack.kafka, start, ids, timeout_s=60)
            async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=30, trust_env=False) as client:
                body = {"model": "sentiment_model", "inputs": ["not now"]}
                refused = await client.post("/v1/jobs", json=body)
        finally:
            await asyncio.to_thread(stack.start_service, "postgres")
    assert_each_once_in_order(found, ids)
    assert (refused.status_code, refused.json()["code"]) == (503, "dependency_down")
    assert int(refused.headers["retry-after"]) >= 1
    assert set(statuses) == {200}


async def test_while_triton_is_replaced_callers_are_told_to_come_back_and_records_wait(stack: Stack) -> None:
    start = await results_end(stack.kafka)
    ids = {f"wait-{number}" for number in range(300)}
    async with callers(stack) as statuses:
        await asyncio.to_thread(stack.stop_service, "triton")
        await produce(stack.kafka, ({"id": one, "model": "sentiment_model", "text": f"{one} waits"} for one in ids))
        async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=5, trust_env=False) as client:
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["dependencies"]["triton"]) == (200, "down")
        await asyncio.to_thread(stack.start_service, "triton")
        found = await read_results(stack.kafka, start, ids, timeout_s=90)
    assert_each_once_in_order(found, ids)
    # Promise 8: the server's trouble is no row's failure.
    assert [read.value for read in found if "error" in read.value] == []
    assert set(statuses) <= {200, 503, 504}
    assert statuses[200] > 0
    assert statuses[503] > 0
