"""Promise 1: a record in the request topic gives exactly one result, whichever process is killed."""

import asyncio
import os
import signal

from local_stack.stack import Stack
from tests.e2e.topics import assert_each_once_in_order, produce, read_results, results_end

ROWS = 2_400


async def test_killing_consumer_triton_and_kafka_in_turn_loses_and_doubles_nothing(stack: Stack) -> None:
    start = await results_end(stack.kafka)
    ids = {f"kept-{number}" for number in range(ROWS)}
    records = ({"id": f"kept-{n}", "model": "sentiment_model", "text": f"record {n} was kept"} for n in range(ROWS))
    await produce(stack.kafka, records)
    for name in ("consumer", "triton", "kafka", "consumer"):
        pid = stack.pid(name)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(stack.wait_ready, name, 90, pid)
    found = await read_results(stack.kafka, start, ids, timeout_s=150)
    assert_each_once_in_order(found, ids)
    assert [read.value for read in found if "error" in read.value] == []
