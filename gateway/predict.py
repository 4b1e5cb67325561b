"""The straight line of a call: admit, tokenize, join the line before the model, one outcome per row."""

import asyncio

from gateway.admission import Admission
from gateway.forms import Call
from gateway.join import Joiner, Outcome
from gateway.metrics import Metrics
from serving.deadline import Deadline
from serving.errors import DeadlineExceeded, ModelNotReady, Overloaded, RowError, TwodoorError, UnknownModel
from serving.pipeline import Pipeline, check_and_encode, encode
from serving.preprocess import Encoded
from serving.registry import Model, Registry
from serving.settings import GatewaySettings

__all__ = ["Outcome", "Predictor"]


class Predictor:
    """Runs calls on the interactive lane. Its bounds are the door's: one instance per process."""

    def __init__(
        self, settings: GatewaySettings, default_model: str, registry: Registry, pipeline: Pipeline, metrics: Metrics
    ) -> None:
        self._settings, self._default = settings, default_model
        self._registry, self._pipeline, self._metrics = registry, pipeline, metrics
        self._admission = Admission(settings.max_admitted_tokens, metrics, max_rows=settings.max_admitted_rows)
        self._joiners: dict[str, Joiner] = {}
        # Lines of versions that were replaced, while something of theirs is on its way.
        self._ending: list[Joiner] = []

    async def run(self, call: Call, deadline: Deadline) -> tuple[Model, list[Outcome]]:
        """Return the model and one outcome per text, in order; counts every row by how it ended.

        Raises UnknownModel, or a ServerError where the whole call cannot be answered.
        """
        name = call.model or self._default
        try:
            with self._metrics.demand.wanted(name, len(call.texts)):
                model, outcomes = await self._on_routed(name, call, deadline)
        except TwodoorError as exc:
            label = name if name in self._registry.names and not isinstance(exc, UnknownModel) else "unknown"
            self._metrics.count_rows(label, [exc.code] * len(call.texts))
            raise
        self._metrics.count_rows(name, (o.code if isinstance(o, RowError) else "ok" for o in outcomes))
        return model, outcomes

    async def _on_routed(self, name: str, call: Call, deadline: Deadline) -> tuple[Model, list[Outcome]]:
        """Run a call on the version that is routed to, and anew where that was unloaded for another one meanwhile."""
        model = self._registry.get(name)
        try:
            return model, await self._run(model, call, deadline)
        except ModelNotReady:
            routed = self._registry.get(name)
            if routed.spec.version == model.spec.version:
                raise
        return routed, await self._run(routed, call, deadline)

    async def _run(self, model: Model, call: Call, deadline: Deadline) -> list[Outcome]:
        tokens = sum(map(model.tokenizer.reserve_tokens, call.texts))
        lease = self._admission.admit(tokens, len(call.texts), deadline)
        served = False
        try:
            encoded = await self._encode(model, call, deadline)
            lengths = [row.tokens for row in encoded if isinstance(row, Encoded)]
            lease.shrink(sum(lengths), len(lengths))
            outcomes = await self._line(model).run(encoded, deadline, lease)
            served = True
            return outcomes
        except Overloaded as exc:
            # The model's own queue is full, in spite of our bounds: other doors fill it too.
            self._metrics.shed.labels("queue_full").inc()
            raise Overloaded(str(exc), self._admission.retry_after_s(lease.tokens, lease.rows)) from exc
        finally:
            lease.drop(served=served)

    async def _encode(self, model: Model, call: Call, deadline: Deadline) -> list[Encoded | RowError]:
        limits = self._settings
        if sum(map(len, call.texts)) <= limits.offload_bytes:
            return check_and_encode(model, call.texts, call.truncate, limits.max_text_chars)
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                return await encode(model, call.texts, call.truncate, limits.max_text_chars, limits.offload_bytes)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the text was tokenized") from None

    def _line(self, model: Model) -> Joiner:
        """Return the line before a model version; a version that was loaded anew gets another one."""
        name = model.spec.name
        joiner = self._joiners.get(name)
        if joiner is None or joiner.model is not model:
            if joiner is not None:
                self._ending = [line for line in (*self._ending, joiner) if line.busy]
            joiner = self._joiners[name] = Joiner(self._pipeline, model, self._settings)
        return joiner

    async def close(self) -> None:
        """End what is still at Triton."""
        for joiner in (*self._joiners.values(), *self._ending):
            await joiner.close()
