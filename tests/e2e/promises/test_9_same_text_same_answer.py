"""Promise 9: SST-2's test sentences have the same labels and scores at every entrance, and those labels are good ones."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from local_stack.stack import Stack
from tests.e2e.topics import assert_each_once_in_order, produce, read_results, results_end

LEAST_ACCURACY = 0.895
LARGEST_DIFFERENCE = 1e-4


async def through_predict(stack: Stack, texts: list[str]) -> list[dict[str, float | str]]:
    """One text a call, then the same texts in lists; the two must agree."""
    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=60, trust_env=False) as client:
        answers = []
        for first in range(0, len(texts), 64):
            reply = await client.post("/predict", json={"text": texts[first : first + 64]})
            assert reply.status_code == 200
            answers += reply.json()["predictions"]
        for text, answer in list(zip(texts, answers, strict=True))[::20]:
            single = (await client.post("/predict", json={"text": text})).json()
            assert single["sentiment"] == answer["sentiment"]
            assert single["score"] == pytest.approx(answer["score"], abs=LARGEST_DIFFERENCE)
    return answers


async def through_topic(stack: Stack, texts: Sequence[str]) -> list[dict[str, Any]]:
    """One record a text."""
    start = await results_end(stack.kafka)
    ids = [f"sst2-{number}" for number in range(len(texts))]
    records = ({"id": one, "model": "sentiment_model", "text": text} for one, text in zip(ids, texts, strict=True))
    await produce(stack.kafka, records)
    found = await read_results(stack.kafka, start, set(ids), timeout_s=120)
    assert_each_once_in_order(found, set(ids))
    outputs = {read.value["id"]: read.value["output"] for read in found}
    return [outputs[one] for one in ids]


async def through_job(stack: Stack, texts: Sequence[str]) -> list[dict[str, Any]]:
    """One line a text."""
    body = "".join(json.dumps(text) + "\n" for text in texts)
    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=60, trust_env=False) as client:
        reply = await client.post(
            "/v1/jobs?model=sentiment_model", content=body, headers={"Content-Type": "application/jsonl"}
        )
        assert reply.status_code == 202, reply.text
        path = reply.headers["location"]
        async with asyncio.timeout(120):
            while (job := (await client.get(path, headers={"Prefer": "wait=20"})).json())["status"] != "completed":
                assert job["status"] in ("queued", "running")
        lines = (await client.get(f"{path}/results")).text.splitlines()
    return [json.loads(line)["output"] for line in lines]


async def test_sst2_has_the_same_labels_at_every_entrance(stack: Stack, sst2: list[tuple[str, str]]) -> None:
    texts = [text for text, _ in sst2]
    # Side by side: rows of the topic and of the job stand in the same micro-batches.
    by_topic, by_job = await asyncio.gather(through_topic(stack, texts), through_job(stack, texts))
    predictions = await through_predict(stack, texts)
    right = {"topic": 0, "job": 0, "predict": 0}
    for outputs in zip(by_topic, by_job, predictions, sst2, strict=True):
        *answers, (_, label) = outputs
        for door, answer in zip(right, answers, strict=True):
            assert answer["label"] == answers[-1]["label"]
            assert answer["score"] == pytest.approx(answers[-1]["score"], abs=LARGEST_DIFFERENCE)
            right[door] += answer["label"] == label
    accuracy = {door: count / len(texts) for door, count in right.items()}
    print(f"SST-2 test, {len(texts)} sentences: accuracy {accuracy}")
    assert min(accuracy.values()) >= LEAST_ACCURACY
