"""The lane: the only loop that calls the pipeline. Rows of every feeder come in here, outcomes go to their owners."""

import asyncio
from collections import deque
from collections.abc import Iterable

import structlog

from batch_consumer.metrics import UNKNOWN, Metrics, Waiting
from batch_consumer.model_lane import ModelLane
from batch_consumer.rows import Row
from batch_consumer.waiting import happens
from serving.errors import DependencyDown, ModelNotReady, UnknownModel
from serving.pipeline import Pipeline
from serving.registry import Registry
from serving.settings import ConsumerSettings

log = structlog.get_logger(__name__)

LOOK_AGAIN_S = 0.2

Wanted = tuple[str, str | None]
"""A model and the version that has to answer; None: the one that new work is routed to."""


class Lane:
    """Sorts rows to one ``ModelLane`` per model version. Rows of a model that is away wait here; those of an unknown one
    end here, unless they have pinned a version: whether that one is gone for good is for others to say.

    The bound of what waits is the feeders' (a partition's window, the chunks claimed): the lane takes what it is given.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        registry: Registry,
        settings: ConsumerSettings,
        metrics: Metrics,
        *,
        paused: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._unsorted: dict[Wanted, deque[Row]] = {}
        self._models: dict[tuple[str, str], ModelLane] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._paused = paused
        self.progress = 0
        """Rows answered so far; the watchdog looks whether it grows."""

    def submit(self, rows: Iterable[Row]) -> None:
        """Take rows; each one's owner gets its outcome, unless the owner dies first."""
        for row in rows:
            self._unsorted.setdefault((row.model, row.version), deque()).append(row)
        self._wake.set()

    @property
    def paused(self) -> bool:
        """Whether no request may begin. Those in flight end, rows wait."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            log.info("bulk paused" if paused else "bulk resumed", rows_in_flight=self.count_in_flight())
        for model in self._models.values():
            model.paused = paused

    async def run(self) -> None:
        """Work until cancelled; then end the micro-batches in flight."""
        try:
            while True:
                self._wake.clear()
                for wanted in list(self._unsorted):
                    self._sort(*wanted)
                self._check_tasks()
                await happens(self._wake, LOOK_AGAIN_S)
        finally:
            tasks = [*self._tasks.values(), *self._ending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _sort(self, name: str, version: str | None) -> None:
        try:
            ready = self._registry.get(name, version).spec.version
        except UnknownModel as error:
            if version is None:
                self._refuse(self._unsorted.pop((name, version)), error)
            return
        except DependencyDown:
            return
        key = (name, ready)
        if key not in self._models:
            model = ModelLane(
                name, ready, self._pipeline, self._registry, self._settings, self._metrics, self._count, self.submit
            )
            model.paused = self._paused
            self._models[key] = model
            self._tasks[key] = asyncio.create_task(model.run(), name=f"lane {name} {ready}")
        self._models[key].add(self._unsorted.pop((name, version)))

    def _refuse(self, rows: Iterable[Row], error: UnknownModel) -> None:
        for row in rows:
            if row.alive:
                row.finish(error)

    def _check_tasks(self) -> None:
        for key, task in list(self._tasks.items()):
            if task.done():
                # A bug ended it. Its rows must not wait for ever: the error ends the process, which is started again.
                task.result()
            if not self._models[key].busy and self._is_gone(*key):
                del self._models[key], self._tasks[key]
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    def _is_gone(self, name: str, version: str) -> bool:
        try:
            self._registry.get(name, version)
        except (UnknownModel, ModelNotReady):
            return True
        except DependencyDown:
            pass
        return False

    def _count(self, rows: int) -> None:
        self.progress += rows

    def drop_dead(self) -> None:
        """Forget the rows nobody waits for any more."""
        for wanted, rows in list(self._unsorted.items()):
            self._unsorted[wanted] = deque(row for row in rows if row.alive)
            if not self._unsorted[wanted]:
                del self._unsorted[wanted]
        for model in self._models.values():
            model.drop_dead()

    def rows_in_flight(self) -> Iterable[Row]:
        """Return the rows that are at Triton now, or whose failure there is still being judged."""
        return [row for model in self._models.values() for row in model.rows_in_flight()]

    def count_in_flight(self) -> int:
        """Return how many rows are at Triton now."""
        return sum(model.at_model for model in self._models.values())

    def has_work(self) -> bool:
        """Return whether rows wait for a model that is not away: if then nothing moves, something is stuck."""
        return not self._paused and any(model.busy and not model.is_waiting for model in self._models.values())

    def waits_for_model(self) -> bool:
        """Return whether rows wait for a model that is away, or for the end of a pause."""
        if self._paused or self._unsorted:
            return True
        return any(model.busy and model.is_waiting for model in self._models.values())

    def waiting(self) -> Waiting:
        """Return how many rows wait for each model and since when, for the metrics."""
        counts: dict[str, tuple[int, float | None]] = {}
        for (name, _), model in self._models.items():
            _add(counts, name, *model.waiting())
        for (name, _), rows in self._unsorted.items():
            label = name if name in self._registry.names else UNKNOWN
            _add(counts, label, len(rows), rows[0].arrived_s if rows else None)
        return counts


def _add(counts: dict[str, tuple[int, float | None]], label: str, rows: int, arrived_s: float | None) -> None:
    count, oldest_s = counts.get(label, (0, None))
    ages = [age for age in (oldest_s, arrived_s) if age is not None]
    counts[label] = (count + rows, min(ages, default=None))
