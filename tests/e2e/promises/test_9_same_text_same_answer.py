"""Promise 9: SST-2's test sentences have the same labels and scores at both doors, and those labels are good ones."""

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


async def test_sst2_has_the_same_labels_at_both_doors(stack: Stack, sst2: list[tuple[str, str]]) -> None:
    texts = [text for text, _ in sst2]
    start = await results_end(stack.kafka)
    ids = [f"sst2-{number}" for number in range(len(texts))]
    records = ({"id": one, "model": "sentiment_model", "text": text} for one, text in zip(ids, texts, strict=True))
    await produce(stack.kafka, records)
    found = await read_results(stack.kafka, start, set(ids), timeout_s=120)
    assert_each_once_in_order(found, set(ids))
    outputs = {read.value["id"]: read.value["output"] for read in found}
    predictions = await through_predict(stack, texts)
    right = {"topic": 0, "predict": 0}
    for one, (_, label), prediction in zip(ids, sst2, predictions, strict=True):
        assert outputs[one]["label"] == prediction["label"]
        assert outputs[one]["score"] == pytest.approx(prediction["score"], abs=LARGEST_DIFFERENCE)
        right["topic"] += outputs[one]["label"] == label
        right["predict"] += prediction["label"] == label
    accuracy = {door: count / len(texts) for door, count in right.items()}
    print(f"SST-2 test, {len(texts)} sentences: accuracy {accuracy}")
    assert min(accuracy.values()) >= LEAST_ACCURACY
