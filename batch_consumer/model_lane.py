"""One model's part of the lane: tokenize, run micro-batches, and find out whose fault a failure was."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import structlog

from batch_consumer import verdict
from batch_consumer.canary import Canary
from batch_consumer.encode import ENCODE_ROWS, encode_rows, next_rows
from batch_consumer.metrics import Metrics
from batch_consumer.microbatch import MAX_PADDING_CPU, MAX_PADDING_GPU, Backlog, padding_ratio
from batch_consumer.pace import Backoff, Pace
from batch_consumer.rows import Outcome, Row
from batch_consumer.verdict import Fault, Step
from serving.crashpoint import crashpoint
from serving.deadline import Deadline
from serving.errors import DependencyDown, ModelNotReady, RowError, TwodoorError, UnknownModel
from serving.pipeline import Pipeline
from serving.registry import Model, Registry
from serving.settings import ConsumerSettings

log = structlog.get_logger(__name__)

LOOK_AGAIN_S = 1.0
# Before a row under which a process died runs again: two consumers whose rows shared one death must not share the next.
DEATH_JITTER_S = 2.0


class ModelLane:
    """The rows of one model. ``run`` is the task its owner awaits; everything else answers at once."""

    def __init__(
        self,
        name: str,
        pipeline: Pipeline,
        registry: Registry,
        settings: ConsumerSettings,
        metrics: Metrics,
        progress: Callable[[int], None],
    ) -> None:
        self._name = name
        self._pipeline = pipeline
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._progress = progress
        self._canary = Canary(name, pipeline, registry, settings)
        self._raw: deque[Row] = deque()
        self._backlog = Backlog()
        self._parts: deque[list[Row]] = deque()
        self._suspects: deque[Row] = deque()
        self._in_flight: dict[asyncio.Task[None], list[Row]] = {}
        self._lone: list[Row] = []
        self._pace = Pace(settings.max_in_flight)
        self._backoff = Backoff(settings.retry_backoff_max_s)
        self._wake = asyncio.Event()
        self._encode_wake = asyncio.Event()
        self.is_waiting = False
        """True while the model or its server is away: rows wait, and that is no stall."""

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows that are not tokenized yet."""
        self._raw.extend(rows)
        self._encode_wake.set()

    @property
    def busy(self) -> bool:
        """Whether any row is here."""
        return bool(self._raw or self._backlog or self._parts or self._suspects or self._in_flight or self._lone)

    def rows_in_flight(self) -> list[Row]:
        """Return the rows that are at Triton now."""
        return [*(row for rows in self._in_flight.values() for row in rows), *self._lone]

    def waiting(self) -> tuple[int, float | None]:
        """Return how many rows wait, and the arrival of the oldest."""
        parts = [row for rows in self._parts for row in rows]
        ages = [queue[0].arrived_s for queue in (self._raw, self._suspects, parts) if queue]
        ages += [age for age in (self._backlog.oldest_s(),) if age is not None]
        return len(self._raw) + len(self._backlog) + len(parts) + len(self._suspects), min(ages, default=None)

    def drop_dead(self) -> None:
        """Forget the rows nobody waits for any more."""
        self._raw = deque(row for row in self._raw if row.alive)
        self._suspects = deque(row for row in self._suspects if row.alive)
        self._parts = deque(alive for rows in self._parts if (alive := [row for row in rows if row.alive]))
        self._backlog.drop_dead()

    async def run(self) -> None:
        """Work until cancelled."""
        encoder = asyncio.create_task(self._encode_loop(), name=f"encode {self._name}")
        try:
            while True:
                self._wake.clear()
                await self._step()
                if encoder.done():
                    encoder.result()
                await _wait(self._wake, LOOK_AGAIN_S)
        finally:
            tasks = [encoder, *self._in_flight]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- tokenizing ---------------------------------------------------------------------------------------------------

    async def _encode_loop(self) -> None:
        while True:
            self._encode_wake.clear()
            while self._raw:
                model = self._model()
                if model is None:
                    break
                rows = next_rows(self._raw)
                errors = await asyncio.to_thread(encode_rows, model, rows, self._settings.max_text_chars)
                crashpoint("after_tokenize")
                self._sort_encoded(rows, errors)
            await _wait(self._encode_wake, LOOK_AGAIN_S)

    def _sort_encoded(self, rows: list[Row], errors: list[RowError | None]) -> None:
        for row, error in zip(rows, errors, strict=True):
            if not row.alive:
                continue
            if error is not None:
                row.finish(error)
                self._progress(1)
            elif row.is_suspect:
                self._suspects.append(row)
            else:
                self._backlog.add(row)
        self._wake.set()

    # -- which request is next ----------------------------------------------------------------------------------------

    def _model(self) -> Model | None:
        """Return the model, or None while it is away; rows of a model that was deleted get their error."""
        try:
            return self._registry.get(self._name)
        except UnknownModel as error:
            self._refuse_all(error)
        except DependencyDown:
            pass
        return None

    def _refuse_all(self, error: RowError) -> None:
        rows = [*self._raw, *self._suspects, *(row for part in self._parts for row in part)]
        self._raw.clear()
        self._suspects.clear()
        self._parts.clear()
        while batch := self._backlog.take(ENCODE_ROWS, 2**31, float("inf")):
            rows += batch
        for row in rows:
            if row.alive:
                row.finish(error)
        self._progress(len(rows))

    async def _step(self) -> None:
        """Start as many requests as may be in flight."""
        while self._backlog or self._parts or self._suspects:
            model = self._model()
            if model is None or not self._registry.bulk_ready(self._name):
                self.is_waiting = True
                return
            if self.is_waiting:
                if self._in_flight or not await self._recover():
                    return
            elif self._suspects:
                if self._in_flight:
                    return
                await self._run_alone(model, self._suspects.popleft())
            elif len(self._in_flight) < self._pace.limit and (rows := self._next_rows(model)):
                self._start(model, rows)
            else:
                return

    def _next_rows(self, model: Model) -> list[Row]:
        settings = self._settings
        while self._parts or self._backlog:
            if self._parts:
                rows = self._parts.popleft()
            else:
                most = min(settings.max_microbatch_rows, model.spec.max_batch_rows)
                padding = MAX_PADDING_GPU if model.spec.on_gpu else MAX_PADDING_CPU
                rows = self._backlog.take(most, settings.max_microbatch_tokens, padding)
            if rows := self._fresh(model, rows):
                return rows
        return []

    def _fresh(self, model: Model, rows: list[Row]) -> list[Row]:
        """Keep the rows that somebody waits for and that this version's tokenizer made; the others go back."""
        old = [row for row in rows if row.alive and row.tokenizer != model.spec.tokenizer_sha256]
        if old:
            self.add(old)
        return [row for row in rows if row.alive and row.tokenizer == model.spec.tokenizer_sha256]

    async def _recover(self) -> bool:
        """Wait until the canary passes again; False where it does not yet."""
        if await self._canary.passes(rounds=2):
            self.is_waiting = False
            self._backoff.reset()
            return True
        await asyncio.sleep(self._backoff.next_s())
        self._wake.set()
        return False

    def _wait_for_server(self, fault: Fault, error: TwodoorError) -> None:
        if not self.is_waiting:
            log.warning("bulk waits for the model", model=self._name, reason=fault.value, error=str(error))
        self.is_waiting = True

    # -- requests beside others ---------------------------------------------------------------------------------------

    def _start(self, model: Model, rows: list[Row]) -> None:
        task = asyncio.create_task(self._run_request(model, rows), name=f"micro-batch {self._name}")
        self._in_flight[task] = rows
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        rows = self._in_flight.pop(task)
        self._wake.set()
        if not task.cancelled() and task.exception() is not None:
            # A bug of ours: the rows go back, the error is shown, and the canary has to pass before they run again.
            log.error("micro-batch broke", model=self._name, rows=len(rows), exc_info=task.exception())
            self.is_waiting = True
            self.add(rows)

    async def _run_request(self, model: Model, rows: list[Row]) -> None:
        try:
            outcomes = await self._infer(model, rows)
        except TwodoorError as error:
            self._request_failed(rows, error)
            return
        self._pace.succeeded()
        self._deliver(rows, outcomes)

    def _request_failed(self, rows: list[Row], error: TwodoorError) -> None:
        fault = verdict.fault_of(error)
        step = verdict.after_request(fault, len(rows))
        self._metrics.retries.labels(fault.value).inc()
        if step is Step.CONDEMN:
            self._deliver(rows, [verdict.sentence(fault, error)])
        elif step is Step.SPLIT:
            if fault is Fault.LATE:
                # The request may still run: whatever goes behind it now would be late as well.
                self._wait_for_server(fault, error)
            self._parts.extend(verdict.halves(rows))
        elif step is Step.RUN_ALONE:
            rows[0].mark_suspect()
            self._suspects.extend(rows)
        elif step is Step.SLOW_DOWN:
            self._pace.refused()
            self._parts.append(rows)
            self.is_waiting = True
        else:
            self._wait_for_server(fault, error)
            if step is Step.WAIT_AND_SUSPECT:
                for row in rows:
                    row.mark_suspect()
                self._suspects.extend(rows)
            else:
                self._parts.append(rows)

    async def _infer(self, model: Model, rows: list[Row]) -> list[Outcome]:
        started_s = time.monotonic()
        encoded = [row.encoded for row in rows if row.encoded is not None]
        crashpoint("before_infer")
        outcomes: list[Outcome] = await self._pipeline.infer(
            model, encoded, "bulk", Deadline.after_ms(self._settings.model_timeout_s * 1000), headers=_trace(rows)
        )
        crashpoint("after_infer")
        self._metrics.microbatch_seconds.labels(self._name).observe(time.monotonic() - started_s)
        self._metrics.padding_ratio.labels(self._name).observe(padding_ratio(rows))
        return outcomes

    def _deliver(self, rows: list[Row], outcomes: Iterable[Outcome]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            row.finish(outcome)
        self._progress(len(rows))

    # -- a suspect alone ----------------------------------------------------------------------------------------------

    async def _run_alone(self, model: Model, row: Row) -> None:
        """Run one row with nothing else of this model in flight, the canary before and, if it fails, after it."""
        if not self._fresh(model, [row]):
            return
        if row.deaths:
            await asyncio.sleep(random.uniform(0, DEATH_JITTER_S))  # noqa: S311 (jitter, no secret)
        if not await self._canary.passes():
            self._suspects.appendleft(row)
            self._wait_for_server(Fault.LOST, ModelNotReady("the canary fails"))
            return
        self._lone = [row]
        try:
            outcomes = await self._infer(model, [row])
        except TwodoorError as error:
            await self._lone_request_failed(row, error)
        else:
            self._deliver([row], outcomes)
        finally:
            self._lone = []

    async def _lone_request_failed(self, row: Row, error: TwodoorError) -> None:
        fault = verdict.fault_of(error)
        self._metrics.retries.labels(fault.value).inc()
        row.late += fault is Fault.LATE
        passes_after = await self._canary_after(fault, error, row)
        step = verdict.after_lone_request(fault, True, passes_after, row.late)
        if step is Step.CONDEMN:
            log.warning("row condemned", model=self._name, reason=fault.value)
            self._deliver([row], [verdict.sentence(fault, error)])
            return
        if step is Step.COUNT_DEATH and row.alive:
            row.mark_suspect(deaths=1)
            log.warning("model died under one row", model=self._name, deaths=row.deaths)
            if row.deaths >= self._settings.row_deaths:
                self._deliver([row], [verdict.crashed(row.deaths)])
                return
        elif step in (Step.WAIT, Step.SLOW_DOWN):
            self._wait_for_server(fault, error)
        self._suspects.append(row)

    async def _canary_after(self, fault: Fault, error: TwodoorError, row: Row) -> bool:
        """Run the canary after a failure; where the model has to come back first, wait until it has, however long."""
        if fault not in (Fault.LOST, Fault.LATE):
            return await self._canary.passes()
        self._wait_for_server(fault, error)
        while row.alive and not self._is_deleted():
            if self._registry.bulk_ready(self._name) and await self._recover():
                return True
            await asyncio.sleep(self._backoff.next_s())
        return False

    def _is_deleted(self) -> bool:
        """Whether the model is in the repository no more; then waiting for it has no end."""
        try:
            self._registry.get(self._name)
        except UnknownModel:
            return True
        except DependencyDown:
            pass
        return False


def _trace(rows: list[Row]) -> Mapping[str, str] | None:
    """Return the trace headers of the first row that has them: one request can carry on only one trace."""
    return next((row.trace for row in rows if row.trace), None)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
