"""What a call holds at the door while its rows are on their way, over a fake model server."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from gateway.forms import Call
from gateway.metrics import Metrics
from gateway.predict import Predictor
from serving.deadline import Deadline
from serving.preprocess import Encoded
from serving.registry import Model
from serving.settings import GatewaySettings
from tests.unit.test_gateway_join import FakePipeline, spec_of


class Words:
    """A tokenizer of one token a character."""

    def reserve_tokens(self, text: str) -> int:
        return len(text) + 2

    def encode(self, texts: list[str], truncate: bool) -> list[Encoded]:
        return [Encoded(np.ones(len(text), dtype=np.int64)) for text in texts]


async def test_a_row_with_an_error_of_its_own_takes_no_place_of_those_that_run() -> None:
    metrics, server = Metrics(), FakePipeline()
    model = Model(spec_of(), cast("Any", Words()), None)
    registry = SimpleNamespace(get=lambda _: model, names=frozenset({"m"}))
    predictor = Predictor(GatewaySettings(), "m", cast("Any", registry), cast("Any", server), metrics)
    call = Call(("", "good", " "), single=False)
    running = asyncio.create_task(predictor.run(call, Deadline.after_ms(5_000)))
    async with asyncio.timeout(5):
        while not server.sent:
            await asyncio.sleep(0)
    assert "twodoor_admitted_rows 1.0" in metrics.render().decode()
    assert "twodoor_admitted_tokens 4.0" in metrics.render().decode()
    server.let(1)
    _, outcomes = await running
    assert len(outcomes) == 3
    assert "twodoor_admitted_rows 0.0" in metrics.render().decode()
