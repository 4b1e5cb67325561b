"""The model's known row: whether the instances of a model's bulk lane answer, and rightly."""

import asyncio

from serving.deadline import Deadline
from serving.errors import DependencyDown, Overloaded, RowError, ServerError, UnknownModel
from serving.pipeline import Pipeline
from serving.registry import Model, Registry
from serving.settings import ConsumerSettings

PLAIN_TEXT = "hello"


class Canary:
    """Asks the bulk lane of one model version for its canary row."""

    def __init__(
        self, name: str, version: str, pipeline: Pipeline, registry: Registry, settings: ConsumerSettings
    ) -> None:
        self._name = name
        self._version = version
        self._pipeline = pipeline
        self._registry = registry
        self._timeout_ms = settings.model_timeout_s * 1000

    async def passes(self, rounds: int = 1) -> bool:
        """Return whether all canaries pass, in each of ``rounds`` one for each instance and one more at once."""
        try:
            model = self._registry.get(self._name, self._version)
        except (DependencyDown, UnknownModel):
            return False
        # A dead instance refuses at once and so draws requests to it; asking once for each instance and one more, at
        # the same time, is what makes it show beside a living one.
        at_once = model.spec.bulk_instances + 1
        for _ in range(rounds):
            answers = await asyncio.gather(*(self._ask(model) for _ in range(at_once)))
            if False in answers or True not in answers:
                return False
        return True

    async def _ask(self, model: Model) -> bool | None:
        """Return whether the canary passes; None where the queue is full, which may be so for as long as others fill it."""
        try:
            return await self._answer(model)
        except Overloaded:
            return None

    async def _answer(self, model: Model) -> bool:
        deadline = Deadline.after_ms(self._timeout_ms)
        if model.canary is not None:
            return await self._pipeline.canary_passes(model, "bulk", deadline)
        # A model without a canary row: that it answers a plain text at all is the best sign there is.
        (encoded,) = await asyncio.to_thread(model.tokenizer.encode, [PLAIN_TEXT], True)
        if isinstance(encoded, RowError):
            return True
        try:
            await self._pipeline.infer(model, [encoded], "bulk", deadline)
        except Overloaded:
            raise
        except (ServerError, RowError):
            return False
        return True
