"""The lane: the only loop that calls the pipeline. Rows of every feeder come in here, outcomes go to their owners."""

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import structlog

from batch_consumer.metrics import UNKNOWN, Metrics, Waiting
from batch_consumer.model_lane import ModelLane
from batch_consumer.rows import Row
from serving.errors import DependencyDown, UnknownModel
from serving.pipeline import Pipeline
from serving.registry import Registry
from serving.settings import ConsumerSettings

log = structlog.get_logger(__name__)

LOOK_AGAIN_S = 0.2


class Lane:
    """Sorts rows to one ``ModelLane`` per model. Rows of a model that is away wait here; those of an unknown one end here.

    The bound of what waits is the feeders' (a partition's window): the lane takes whatever it is given.
    """

    def __init__(self, pipeline: Pipeline, registry: Registry, settings: ConsumerSettings, metrics: Metrics) -> None:
        self._pipeline = pipeline
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._unsorted: dict[str, deque[Row]] = {}
        self._models: dict[str, ModelLane] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self.progress = 0
        """Rows answered so far; the watchdog looks whether it grows."""

    def submit(self, rows: Iterable[Row]) -> None:
        """Take rows; each one's owner gets its outcome, unless the owner dies first."""
        for row in rows:
            self._unsorted.setdefault(row.model, deque()).append(row)
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled; then end the micro-batches in flight."""
        try:
            while True:
                self._wake.clear()
                for name in list(self._unsorted):
                    self._sort(name)
                self._check_tasks()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_AGAIN_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _sort(self, name: str) -> None:
        try:
            self._registry.get(name)
        except UnknownModel as error:
            for row in self._unsorted.pop(name):
                if row.alive:
                    row.finish(error)
            return
        except DependencyDown:
            return
        if name not in self._models:
            self._models[name] = ModelLane(
                name, self._pipeline, self._registry, self._settings, self._metrics, self._count_progress
            )
            self._tasks[name] = asyncio.create_task(self._models[name].run(), name=f"lane {name}")
        self._models[name].add(self._unsorted.pop(name))

    def _check_tasks(self) -> None:
        for task in self._tasks.values():
            if task.done():
                # A bug ended it. Its rows must not wait for ever: the error ends the process, which is started again.
                task.result()

    def _count_progress(self, rows: int) -> None:
        self.progress += rows

    def drop_dead(self) -> None:
        """Forget the rows nobody waits for any more."""
        for name, rows in list(self._unsorted.items()):
            self._unsorted[name] = deque(row for row in rows if row.alive)
            if not self._unsorted[name]:
                del self._unsorted[name]
        for model in self._models.values():
            model.drop_dead()

    def rows_in_flight(self) -> Iterable[Row]:
        """Return the rows that are at Triton now."""
        return [row for model in self._models.values() for row in model.rows_in_flight()]

    def has_work(self) -> bool:
        """Return whether rows wait for a model that is not away: if then nothing moves, something is stuck."""
        return any(model.busy and not model.is_waiting for model in self._models.values())

    def waits_for_model(self) -> bool:
        """Return whether rows wait for a model that is away."""
        return bool(self._unsorted) or any(model.busy and model.is_waiting for model in self._models.values())

    def waiting(self) -> Waiting:
        """Return how many rows wait for each model and since when, for the metrics."""
        counts = {name: model.waiting() for name, model in self._models.items()}
        for name, rows in self._unsorted.items():
            label = name if name in self._registry.names else UNKNOWN
            count, oldest = counts.get(label, (0, None))
            ages = [age for age in (oldest, rows[0].arrived_s if rows else None) if age is not None]
            counts[label] = (count + len(rows), min(ages, default=None))
        return counts
