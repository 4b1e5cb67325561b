"""Promise 5: a cancelled job stops costing model time within one lease renewal and the micro-batches then in flight."""

import asyncio
import json

import httpx

from local_stack.stack import Stack
from tests.parts import wait_until

ROWS = 20_000
# One renewal (1 s), and the consumer's look at it; far under the minute that the job's rows would take.
STOPPED_S = 5.0
ENDED_S = 30.0


async def test_a_cancelled_job_asks_the_model_no_more_and_keeps_a_line_for_each_row(stack: Stack) -> None:
    body = "".join(json.dumps(f"row {number} of a job nobody wants") + "\n" for number in range(ROWS))
    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=60, trust_env=False) as client:
        reply = await client.post(
            "/v1/jobs?model=sentiment_model", content=body, headers={"Content-Type": "application/jsonl"}
        )
        assert reply.status_code == 202, reply.text
        path = f"/v1/jobs/{reply.json()['id']}"
        await asyncio.to_thread(wait_until, lambda: _job(stack, path)["rows"]["succeeded"] > 0, "the first chunk", 60)
        assert (await client.post(f"{path}/cancel")).status_code == 202
        await asyncio.to_thread(wait_until, lambda: _rows_at_model(stack) == 0, "the model is left alone", STOPPED_S)
        await asyncio.to_thread(wait_until, lambda: _job(stack, path)["status"] == "cancelled", "the end", ENDED_S)
        rows = (await client.get(path)).json()["rows"]
        lines = [json.loads(line) for line in (await client.get(f"{path}/results")).text.splitlines()]
    assert [line["index"] for line in lines] == list(range(ROWS))
    cancelled = [line for line in lines if "error" in line]
    assert {line["error"]["code"] for line in cancelled} == {"job_cancelled"}
    assert rows == {"total": ROWS, "succeeded": ROWS - len(cancelled), "failed": len(cancelled), "pending": 0}
    # Cancelled while it ran: some rows kept their answer, most never cost anything.
    assert 0 < rows["succeeded"] < ROWS / 2


def _job(stack: Stack, path: str) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = httpx.get(f"{stack.gateway_url}{path}", timeout=10, trust_env=False).json()
    return found


def _rows_at_model(stack: Stack) -> int:
    reply = httpx.get(f"{stack.gateway_url}/v1/admin/bulk", timeout=10, trust_env=False).json()
    return sum(consumer["rows_in_flight"] for consumer in reply["consumers"])
