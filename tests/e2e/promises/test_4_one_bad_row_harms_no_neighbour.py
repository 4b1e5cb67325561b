"""Promise 4: an error stays with its row, at both doors, also where the row kills the model's process."""

import httpx
import pytest

from local_stack.stack import Stack
from tests.e2e.topics import assert_each_once_in_order, produce, read_results, results_end
from tests.stubs import DIE, FAIL, INF, NAN, STUB, stub_score

GOOD = [f"good neighbour number {number}" for number in range(40)]
BAD = {
    "": "empty_text",
    "word " * 900: "text_too_long",
    f"a row with {NAN}": "non_finite_output",
    f"a row with {INF}": "non_finite_output",
    f"a row with {FAIL}": "model_failed",
}


def rows() -> list[str]:
    """Return bad rows spread among good ones."""
    mixed = list(GOOD)
    for place, text in enumerate(BAD):
        mixed.insert(3 + place * 7, text)
    return mixed


async def test_in_a_list_each_bad_text_has_its_error_and_the_rest_their_answers(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.gateway_url, timeout=30, trust_env=False) as client:
        reply = await client.post("/predict", json={"model": STUB, "text": rows()})
    assert reply.status_code == 200
    for text, prediction in zip(rows(), reply.json()["predictions"], strict=True):
        if text in BAD:
            assert prediction["error"]["code"] == BAD[text], text
        else:
            assert prediction["score"] == pytest.approx(stub_score(text), abs=1e-5), text


async def test_in_the_topic_each_bad_record_has_one_error_and_the_rest_their_answers(stack: Stack) -> None:
    start = await results_end(stack.kafka)
    bad = {**BAD, f"a row with {DIE}": "row_crashed"}
    texts = [*rows(), f"a row with {DIE}", "the last good neighbour"]
    by_id = {f"bad-{number}": text for number, text in enumerate(texts)}
    await produce(stack.kafka, ({"id": one, "model": STUB, "text": text} for one, text in by_id.items()))
    found = await read_results(stack.kafka, start, set(by_id), timeout_s=120)
    assert_each_once_in_order(found, set(by_id))
    for read in found:
        text = by_id[read.value["id"]]
        if text in bad:
            assert read.value["error"]["code"] == bad[text], text
        else:
            assert read.value["output"]["score"] == pytest.approx(stub_score(text), abs=1e-5), text
