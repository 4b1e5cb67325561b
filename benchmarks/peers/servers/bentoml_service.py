"""The BentoML service: a batchable API takes a list of texts, as BentoML merges them; without batching one text."""

from typing import Any

import bentoml

from benchmarks.peers.servers.common import Model, Settings

SETTINGS = Settings.read()
# BentoML sheds load by itself where an answer would take longer than this.
MAX_LATENCY_MS = 20_000
# As with every peer, no line is logged for a call.
QUIET: Any = {"access": {"enabled": False}}


@bentoml.service(workers=SETTINGS.processes, traffic={"timeout": 30}, logging=QUIET)
class OneByOne:
    """A call has one text."""

    def __init__(self) -> None:
        self.model = Model(SETTINGS)

    @bentoml.api
    def predict(self, text: str) -> dict[str, Any]:
        """Answer a text."""
        return self.model.answer([text])[0]


@bentoml.service(workers=SETTINGS.processes, traffic={"timeout": 30}, logging=QUIET)
class Batched:
    """A call has a list of one text; BentoML's adaptive batching joins the lists."""

    def __init__(self) -> None:
        self.model = Model(SETTINGS)

    @bentoml.api(batchable=True, max_batch_size=SETTINGS.max_batch, max_latency_ms=MAX_LATENCY_MS)
    def predict(self, texts: list[str]) -> list[dict[str, Any]]:
        """Answer a batch."""
        return self.model.answer(texts)
