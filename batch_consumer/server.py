"""The bulk lane of one model version: how it is asked, whether it answers, and how long to wait where it does not."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import structlog

from batch_consumer.canary import PLAIN_TEXT, Canary
from batch_consumer.cost import CostTable, Shape, shapes_to_time
from batch_consumer.metrics import Metrics
from batch_consumer.microbatch import MAX_TOKENS_CPU, MAX_TOKENS_GPU, padding_ratio
from batch_consumer.pace import Backoff
from batch_consumer.rows import Outcome, Row
from batch_consumer.verdict import Fault, fault_of
from serving.crashpoint import crashpoint
from serving.deadline import Deadline
from serving.errors import (
    DeadlineExceeded,
    DependencyDown,
    ModelFailed,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    TwodoorError,
    UnknownModel,
    VersionGone,
)
from serving.models import ModelSpec, padded_length
from serving.pipeline import Pipeline
from serving.preprocess import Encoded
from serving.registry import Model, Registry
from serving.settings import ConsumerSettings

log = structlog.get_logger(__name__)

# Timing shapes: how often each runs, and how long all of them may take together.
COST_RUNS = 3
COST_S = 3.0
# So often a shape may be what a model was at when it went away or was late; then it is left out, with all dearer ones.
COST_FAILURES = 2


class ModelServer:
    """What the requests of one model version share."""

    def __init__(
        self,
        name: str,
        version: str,
        pipeline: Pipeline,
        registry: Registry,
        settings: ConsumerSettings,
        metrics: Metrics,
    ) -> None:
        self.name = name
        self.version = version
        self._pipeline = pipeline
        self._registry = registry
        self._settings = settings
        self._timeout_ms = settings.model_timeout_s * 1000
        self._metrics = metrics
        self._canary = Canary(name, version, pipeline, registry, settings)
        self._backoff = Backoff(settings.retry_backoff_max_s)
        self._costs: CostTable | None = None
        self._costs_of: ModelSpec | None = None
        self._cost_failures: Counter[Shape] = Counter()
        self._limit_ms = 0.0
        self.paused = False
        """True while no request may begin, by the operator's wish."""
        self.is_waiting = False
        """True while the model or its server is away: rows wait, and that is no stall."""
        self.rows_at_model = 0

    def get(self) -> Model:
        """Return the version; raises as ``Registry.get`` does."""
        return self._registry.get(self.name, self.version)

    def bulk_ready(self) -> bool:
        """Return whether the instance of the bulk lane is ready."""
        return self._registry.bulk_ready(self.name, self.version)

    def is_lost_to(self, row: Row) -> bool:
        """Return whether this row waits here in vain: the model was deleted, or the row is free to take another version."""
        try:
            self.get()
        except UnknownModel:
            return True
        except VersionGone:
            return row.version is None
        except DependencyDown:
            pass
        return False

    async def infer(self, model: Model, rows: Sequence[Row]) -> list[Outcome]:
        """Run tokenized rows as one request; raises as ``Pipeline.infer`` does."""
        started_s = time.monotonic()
        encoded = [row.encoded for row in rows if row.encoded is not None]
        crashpoint("before_infer")
        self.rows_at_model += len(rows)
        try:
            outcomes: list[Outcome] = await self._pipeline.infer(
                model, encoded, "bulk", Deadline.after_ms(self._timeout_ms), headers=_trace(rows)
            )
        finally:
            self.rows_at_model -= len(rows)
        crashpoint("after_infer")
        self._metrics.microbatch_seconds.labels(self.name).observe(time.monotonic() - started_s)
        self._metrics.padding_ratio.labels(self.name).observe(padding_ratio(rows))
        return outcomes

    def most_in_flight(self, model: Model) -> int:
        """Return how many requests may be in flight: what the setting says, else the bulk instances and one more.

        One more waits at Triton, so that no instance waits for us; a second one would only be further from here.
        """
        return self._settings.max_in_flight or model.spec.bulk_instances + 1

    def most_tokens(self, model: Model) -> int:
        """Return how many padded tokens a micro-batch of several rows may have."""
        return self._settings.max_microbatch_tokens or (MAX_TOKENS_GPU if model.spec.on_gpu else MAX_TOKENS_CPU)

    def fits(self, rows: int, length: int) -> bool:
        """Return whether a micro-batch of ``rows`` rows, the longest of ``length`` tokens, is short enough."""
        if self._costs is None or self._costs_of is None:
            return True
        return self._costs.ms(rows, padded_length(self._costs_of, [length] * rows)) <= self._limit_ms

    async def know_cost(self, model: Model) -> bool:
        """See that the cost of each shape is known where micro-batches have to stay short; False where it cannot be yet."""
        self._limit_ms = batch_limit_ms(self._settings, model)
        if self._costs_of != model.spec:
            # Loaded again with another config, on other instances perhaps.
            self._costs, self._costs_of = None, model.spec
            self._cost_failures.clear()
        if not self._limit_ms or self._costs is not None:
            return True
        shapes = shapes_to_time(
            min(self._settings.max_microbatch_rows, model.spec.max_batch_rows),
            model.spec.max_tokens,
            self.most_tokens(model),
        )
        try:
            timed = await self._time_shapes(model, shapes)
        except Overloaded:
            await self.pause()
            return False
        except TwodoorError as error:
            self.wait(fault_of(error), error)
            return False
        if timed is None:
            return False
        # A model that fails on made-up rows may do well on real ones: they go one by one.
        self._costs = CostTable(timed or {shapes[0]: self._limit_ms})
        costs = {f"{rows}x{length}": round(ms, 1) for (rows, length), ms in self._costs}
        log.info("cost of micro-batches measured", model=self.name, limit_ms=self._limit_ms, ms=costs)
        return True

    async def _time_shapes(self, model: Model, shapes: Sequence[Shape]) -> dict[Shape, float] | None:
        """Run each shape a few times, the cheapest first, within a bounded time; returns the quickest run of each.

        None where a pause came. Raises as ``Pipeline.infer`` does where the model was late or went away.
        """
        end_s = time.monotonic() + COST_S
        (encoded,) = await asyncio.to_thread(model.tokenizer.encode, [PLAIN_TEXT], True)
        ids = encoded.ids if isinstance(encoded, Encoded) else np.zeros(1, dtype=np.int64)
        timed: dict[Shape, float] = {}
        for rows, length in shapes:
            if self._cost_failures[rows, length] >= COST_FAILURES:
                return timed
            batch = [Encoded(np.resize(ids, length))] * rows
            for _ in range(COST_RUNS):
                if self.paused:
                    return None
                begin_s = time.monotonic()
                try:
                    await self._pipeline.infer(model, batch, "bulk", Deadline.after_ms(self._timeout_ms))
                except (ModelFailed, ModelRefused):
                    return timed
                except (DeadlineExceeded, DependencyDown) as error:
                    # To be taken out of service is no failure.
                    self._cost_failures[rows, length] += not isinstance(error, ModelNotReady)
                    raise
                now_s = time.monotonic()
                timed[rows, length] = min(timed.get((rows, length), float("inf")), (now_s - begin_s) * 1000)
                if now_s > end_s:
                    return timed
        return timed

    def retried(self, fault: Fault) -> None:
        """Count a request that has to be done again, or judged."""
        self._metrics.retries.labels(fault.value).inc()

    def wait(self, fault: Fault, error: TwodoorError) -> None:
        """Start no request until the canary passes again."""
        if not self.is_waiting:
            log.warning("bulk waits for the model", model=self.name, reason=fault.value, error=str(error))
        self.is_waiting = True

    async def passes(self) -> bool:
        """Return whether the canary passes."""
        return await self._canary.passes()

    async def recover(self) -> bool:
        """Ask whether the canary passes again; where it does not yet, return False after a pause."""
        if await self._canary.passes(rounds=2):
            self.is_waiting = False
            self._backoff.reset()
            return True
        await self.pause()
        return False

    async def pause(self) -> None:
        """Wait a while before the next try."""
        await asyncio.sleep(self._backoff.next_s())


def batch_limit_ms(settings: ConsumerSettings, model: Model) -> float:
    """Return how long a micro-batch may take, 0 = any time.

    Where the operating system takes the processor away from bulk work in the middle of a batch its length hurts nobody.
    """
    if settings.bulk_batch_ms is not None:
        return settings.bulk_batch_ms
    return model.spec.bulk_batch_ms if model.spec.lanes_are_equals else 0.0


def _trace(rows: Sequence[Row]) -> Mapping[str, str] | None:
    """Return the trace headers of the first row that has them: one request can carry on only one trace."""
    return next((row.trace for row in rows if row.trace), None)
