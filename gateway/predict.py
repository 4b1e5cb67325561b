"""The straight line of a call: admit, tokenize, send within the bounds, one outcome per row."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from opentelemetry.trace import SpanKind

from gateway.admission import Admission, Lease, Slots
from gateway.forms import Call
from gateway.metrics import Metrics
from serving.deadline import Deadline
from serving.errors import (
    DeadlineExceeded,
    DependencyDown,
    ModelFailed,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    RowError,
    TwodoorError,
    UnknownModel,
)
from serving.pipeline import Pipeline, encode, plan_requests
from serving.postprocess import Answer
from serving.preprocess import Encoded
from serving.registry import Model, Registry
from serving.settings import GatewaySettings
from serving.telemetry import inject_headers, span

T = TypeVar("T")
Outcome = Answer | RowError


class Predictor:
    """Runs calls on the interactive lane. Its bounds are the door's: one instance per process."""

    def __init__(
        self, settings: GatewaySettings, default_model: str, registry: Registry, pipeline: Pipeline, metrics: Metrics
    ) -> None:
        self._settings, self._default = settings, default_model
        self._registry, self._pipeline, self._metrics = registry, pipeline, metrics
        self._admission = Admission(settings.max_admitted_tokens, metrics)
        self._slots = Slots(settings.max_in_flight)

    async def run(self, call: Call, deadline: Deadline) -> tuple[Model, list[Outcome]]:
        """Return the model and one outcome per text, in order; counts every row by how it ended.

        Raises UnknownModel, or a ServerError where the whole call cannot be answered.
        """
        name = call.model or self._default
        try:
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
        lease = self._admission.admit(sum(map(model.tokenizer.reserve_tokens, call.texts)))
        try:
            encoded = await self._encode(model, call, deadline)
            lease.shrink(sum(row.tokens for row in encoded if isinstance(row, Encoded)))
            return await self._infer(model, encoded, deadline, lease)
        except Overloaded as exc:
            # The model's own queue is full, in spite of our bounds: other doors fill it too.
            self._metrics.shed.labels("queue_full").inc()
            raise Overloaded(str(exc), self._admission.retry_after_s(lease.tokens)) from exc
        finally:
            lease.drop()

    async def _encode(self, model: Model, call: Call, deadline: Deadline) -> list[Encoded | RowError]:
        limits = self._settings
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                return await encode(model, call.texts, call.truncate, limits.max_text_chars, limits.offload_bytes)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the text was tokenized") from None

    async def _infer(
        self, model: Model, encoded: Sequence[Encoded | RowError], deadline: Deadline, lease: Lease
    ) -> list[Outcome]:
        """Send the rows that can be sent, neighbours in length together; errors keep their places."""
        outcomes: list[Outcome | None] = [row if isinstance(row, RowError) else None for row in encoded]
        rows = [(index, row) for index, row in enumerate(encoded) if isinstance(row, Encoded)]
        most = min(self._settings.max_request_rows, model.spec.max_batch_rows)
        plan = plan_requests([row.tokens for _, row in rows], most, self._settings.max_request_tokens)
        groups = [[rows[place] for place in places] for places in plan]
        answers = await together([self._group(model, [row for _, row in group], deadline, lease) for group in groups])
        for group, group_outcomes in zip(groups, answers, strict=True):
            for (index, _), outcome in zip(group, group_outcomes, strict=True):
                outcomes[index] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    async def _group(self, model: Model, rows: Sequence[Encoded], deadline: Deadline, lease: Lease) -> list[Outcome]:
        """Run rows as one request. When the model fails on it, each row runs alone, so that only the bad one fails."""
        try:
            return await self._send(model, rows, deadline, lease)
        except ModelFailed as exc:
            if len(rows) == 1:
                return [await self._blame(model, exc, deadline, lease)]
        alone = await together([self._group(model, [row], deadline, lease) for row in rows])
        return [outcome for outcomes in alone for outcome in outcomes]

    async def _blame(self, model: Model, error: ModelFailed, deadline: Deadline, lease: Lease) -> ModelFailed:
        """Return the error as the row's own, unless the model fails on its known row too: then nothing is wrong with it."""
        if isinstance(error, ModelRefused):
            return error
        slot = await self._slots.take(deadline, lease)
        try:
            passes = await self._pipeline.canary_passes(model, "interactive", deadline)
        finally:
            slot.release()
        if not passes:
            deadline.remaining_s()
            raise DependencyDown(f"model {model.spec.name} fails on its known row too") from error
        return error

    async def _send(self, model: Model, rows: Sequence[Encoded], deadline: Deadline, lease: Lease) -> list[Outcome]:
        slot = await self._slots.take(deadline, lease)
        with span("triton infer", kind=SpanKind.CLIENT):
            return await self._pipeline.infer(
                model, rows, "interactive", deadline, inject_headers(), ended=slot.release
            )


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results in order; the first error ends the others and is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except* TwodoorError as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first
