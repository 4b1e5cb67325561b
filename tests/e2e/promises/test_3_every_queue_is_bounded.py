"""Promise 3: overload is a typed answer that says when to come back, and afterwards all is as before."""

import asyncio

import httpx

from local_stack.stack import Stack


async def test_a_flood_is_answered_or_refused_with_a_time_to_come_back(stack: Stack) -> None:
    text = "a film that takes its time and then takes some more of it " * 8
    body = {"text": [text] * 64, "truncate": True}
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=stack.gateway_url, limits=limits, timeout=60, trust_env=False) as client:
        replies = await asyncio.gather(*(client.post("/predict", json=body) for _ in range(120)))
        statuses = {reply.status_code for reply in replies}
        assert statuses <= {200, 503, 504}
        refused = [reply for reply in replies if reply.status_code == 503]
        assert refused, "the flood was smaller than the bound"
        for reply in refused:
            assert reply.json()["code"] == "overloaded"
            assert 1 <= int(reply.headers["retry-after"]) <= 120
        assert any(reply.status_code == 200 for reply in replies)
        after = await client.post("/predict", json={"text": "calm again"})
        assert after.status_code == 200
