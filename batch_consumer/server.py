"""The bulk lane of one model version: how it is asked, whether it answers, and how long to wait where it does not."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import structlog

from batch_consumer.canary import Canary
from batch_consumer.metrics import Metrics
from batch_consumer.microbatch import padding_ratio
from batch_consumer.pace import Backoff
from batch_consumer.rows import Outcome, Row
from batch_consumer.verdict import Fault
from serving.crashpoint import crashpoint
from serving.deadline import Deadline
from serving.errors import DependencyDown, TwodoorError, UnknownModel, VersionGone
from serving.pipeline import Pipeline
from serving.registry import Model, Registry
from serving.settings import ConsumerSettings

log = structlog.get_logger(__name__)


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
        self._timeout_ms = settings.model_timeout_s * 1000
        self._metrics = metrics
        self._canary = Canary(name, version, pipeline, registry, settings)
        self._backoff = Backoff(settings.retry_backoff_max_s)
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


def _trace(rows: Sequence[Row]) -> Mapping[str, str] | None:
    """Return the trace headers of the first row that has them: one request can carry on only one trace."""
    return next((row.trace for row in rows if row.trace), None)
