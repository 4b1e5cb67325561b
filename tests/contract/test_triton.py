"""What both doors rely on in a Triton, whichever backend runs the models: shapes, errors, lanes, deadlines, values."""

import asyncio

import numpy as np
import pytest

from serving.deadline import Deadline
from serving.errors import DeadlineExceeded, ModelFailed, ServerError, UnknownModel
from serving.pipeline import encode
from serving.postprocess import Classification, Embedding
from serving.preprocess import Encoded, pad
from serving.registry import Model
from tests.contract.conftest import Served

TEXTS = ["a lovely little film", "what a bore", "an evening that never quite decides what it wants to be " * 6]


async def rows(model: Model, texts: list[str]) -> list[Encoded]:
    encoded = await encode(model, texts, truncate=False, max_chars=10_000, offload_bytes=10_000)
    assert all(isinstance(row, Encoded) for row in encoded)
    return [row for row in encoded if isinstance(row, Encoded)]


def in_ms(milliseconds: float = 30_000) -> Deadline:
    return Deadline.after_ms(milliseconds)


@pytest.mark.parametrize("name", ["sentiment_model", "embedding_model"])
async def test_each_default_model_has_its_inputs_output_and_lanes(served: Served, name: str) -> None:
    spec = served.registry.get(name).spec
    assert spec.inputs == ("input_ids", "attention_mask")
    assert (spec.output, spec.output_size) == {"sentiment_model": ("logits", 2), "embedding_model": ("embedding", 384)}[
        name
    ]
    assert spec.bulk_model == f"{name}_bulk"
    loaded = [await served.client.model_config(model, "") for model in (name, spec.bulk_model)]
    assert [config["optimization"]["priority"] for config in loaded] == ["PRIORITY_MAX", "PRIORITY_MIN"]


async def test_a_bulk_twin_is_no_model_to_callers(served: Served) -> None:
    assert {"sentiment_model", "embedding_model"} <= served.registry.names
    with pytest.raises(UnknownModel):
        served.registry.get("sentiment_model_bulk")


@pytest.mark.parametrize("lane", ["interactive", "bulk"])
@pytest.mark.parametrize("name", ["sentiment_model", "embedding_model"])
async def test_each_lane_answers_the_known_row_within_a_thousandth(served: Served, name: str, lane: str) -> None:
    model = served.registry.get(name)
    assert model.canary is not None
    triton_name = model.spec.bulk_model if lane == "bulk" else name
    output = await served.client.infer(triton_name, "", model.canary.inputs, model.spec.output, in_ms())
    assert output.shape == (1, model.spec.output_size)
    np.testing.assert_allclose(output[0], model.canary.values, rtol=0, atol=1e-3)


@pytest.mark.parametrize("lane", ["interactive", "bulk"])
async def test_a_row_has_the_same_answer_alone_and_beside_longer_neighbours(served: Served, lane: str) -> None:
    model = served.registry.get("sentiment_model")
    encoded = await rows(model, TEXTS)
    name = model.spec.bulk_model if lane == "bulk" else model.spec.name
    together = await served.client.infer(name, "", pad(model.spec, encoded), "logits", in_ms())
    for index, row in enumerate(encoded):
        alone = await served.client.infer(name, "", pad(model.spec, [row]), "logits", in_ms())
        np.testing.assert_allclose(alone[0], together[index], rtol=0, atol=1e-4)


async def test_the_pipeline_renders_labels_and_unit_embeddings(served: Served) -> None:
    classifier, embedder = served.registry.get("sentiment_model"), served.registry.get("embedding_model")
    good, bad, _ = await served.pipeline.infer(classifier, await rows(classifier, TEXTS), "interactive", in_ms())
    assert isinstance(good, Classification)
    assert isinstance(bad, Classification)
    assert (good.label, bad.label) == ("positive", "negative")
    for answer in await served.pipeline.infer(embedder, await rows(embedder, TEXTS), "bulk", in_ms()):
        assert isinstance(answer, Embedding)
        assert np.linalg.norm(answer.values) == pytest.approx(1, abs=1e-3)


async def test_many_equal_calls_at_once_are_each_answered(served: Served) -> None:
    model = served.registry.get("sentiment_model")
    (row,) = await rows(model, TEXTS[:1])
    calls = [served.pipeline.infer(model, [row], "interactive", in_ms()) for _ in range(64)]
    answers = [answer for (answer,) in await asyncio.gather(*calls)]
    scores = [answer.score for answer in answers if isinstance(answer, Classification)]
    assert len(scores) == 64
    assert max(scores) - min(scores) < 1e-4


@pytest.mark.parametrize(
    "shapes",
    [
        {"input_ids": (1, 8), "attention_mask": (1, 9)},
        {"input_ids": (1, 8)},
        {"input_ids": (8,), "attention_mask": (8,)},
        {"input_ids": (1, 8), "attention_mask": (1, 8), "token_type_ids": (1, 8)},
    ],
)
async def test_a_request_of_a_wrong_shape_fails_alone_and_as_its_own_fault(
    served: Served, shapes: dict[str, tuple[int, ...]]
) -> None:
    inputs = {name: np.ones(shape, dtype=np.int64) for name, shape in shapes.items()}
    with pytest.raises(ModelFailed):
        await served.client.infer("sentiment_model", "", inputs, "logits", in_ms())


async def test_an_id_outside_the_vocabulary_harms_no_neighbour(served: Served) -> None:
    bad = {"input_ids": np.full((1, 16), 10**9), "attention_mask": np.ones((1, 16), dtype=np.int64)}
    model = served.registry.get("sentiment_model")
    (row,) = await rows(model, TEXTS[:1])
    calls = [served.pipeline.infer(model, [row], "interactive", in_ms()) for _ in range(8)]
    wrong = served.client.infer("sentiment_model", "", bad, "logits", in_ms())
    first, *rest = await asyncio.gather(wrong, *calls, return_exceptions=True)
    assert isinstance(first, Exception)
    assert getattr(first, "code", "") == "model_failed"
    assert all(isinstance(answer, list) and isinstance(answer[0], Classification) for answer in rest)


async def test_an_unknown_model_is_told_apart_from_one_that_is_not_ready(served: Served) -> None:
    inputs = {"input_ids": np.ones((1, 8), dtype=np.int64), "attention_mask": np.ones((1, 8), dtype=np.int64)}
    with pytest.raises(UnknownModel):
        await served.client.infer("no_such_model", "", inputs, "logits", in_ms())


async def test_a_deadline_is_kept_while_the_model_works_and_the_server_survives_it(served: Served) -> None:
    model = served.registry.get("sentiment_model")
    heavy = [Encoded(np.full(512, 2_000, dtype=np.int64))] * 4
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(served.pipeline.infer(model, heavy, "bulk", in_ms(60_000)))
    started = loop.time()
    with pytest.raises(DeadlineExceeded):
        await served.pipeline.infer(model, heavy, "bulk", in_ms(50))
    assert loop.time() - started < 2
    assert len(await running) == 4
    assert await served.pipeline.canary_passes(model, "bulk", in_ms())


async def test_callers_who_leave_do_not_harm_the_server(served: Served) -> None:
    model = served.registry.get("sentiment_model")
    (row,) = await rows(model, TEXTS[:1])
    tasks = [asyncio.ensure_future(served.pipeline.infer(model, [row] * 8, "interactive", in_ms())) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert await served.pipeline.canary_passes(model, "interactive", in_ms())


async def test_a_full_queue_is_refused_as_overload(served: Served) -> None:
    model = served.registry.get("sentiment_model")
    config = await served.client.model_config("sentiment_model_bulk", "")
    bound = int(config["dynamic_batching"]["default_queue_policy"]["max_queue_size"])
    assert 0 < bound <= 4096
    row = Encoded(np.full(128, 2_000, dtype=np.int64))
    calls = [served.pipeline.infer(model, [row], "bulk", in_ms(60_000)) for _ in range(bound + 128)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, ServerError)]
    answered = [outcome for outcome in outcomes if isinstance(outcome, list)]
    assert len(refused) + len(answered) == len(outcomes)
    assert {error.code for error in refused} <= {"overloaded"}
    assert len(answered) >= bound
