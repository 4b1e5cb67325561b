"""One model version's part of the lane: tokenize, run micro-batches beside each other, and sort out what failed."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import structlog

from batch_consumer import verdict
from batch_consumer.encode import ENCODE_ROWS, encode_rows, next_rows
from batch_consumer.metrics import Metrics
from batch_consumer.microbatch import MAX_PADDING_CPU, MAX_PADDING_GPU, Backlog
from batch_consumer.pace import Pace
from batch_consumer.rows import Outcome, Row
from batch_consumer.server import ModelServer
from batch_consumer.suspects import Suspects
from batch_consumer.verdict import Fault, Step
from batch_consumer.waiting import happens
from serving.crashpoint import crashpoint
from serving.errors import DependencyDown, RowError, TwodoorError, UnknownModel, VersionGone
from serving.pipeline import Pipeline
from serving.registry import Model, Registry
from serving.settings import ConsumerSettings

log = structlog.get_logger(__name__)

LOOK_AGAIN_S = 1.0


class ModelLane:
    """The rows of one model version. ``run`` is the task its owner awaits; everything else answers at once."""

    def __init__(
        self,
        name: str,
        version: str,
        pipeline: Pipeline,
        registry: Registry,
        settings: ConsumerSettings,
        metrics: Metrics,
        progress: Callable[[int], None],
        give_back: Callable[[Iterable[Row]], None],
    ) -> None:
        """``give_back`` takes the rows that another version has to answer, now that this one is gone."""
        self._name = name
        self._settings = settings
        self._progress = progress
        self._hand_over = give_back
        self._server = ModelServer(name, version, pipeline, registry, settings, metrics)
        self._raw: deque[Row] = deque()
        self._backlog = Backlog()
        self._parts: deque[list[Row]] = deque()
        self._suspects = Suspects(self._server, settings.row_deaths, self._deliver)
        self._encoding = 0
        self._in_flight: dict[asyncio.Task[None], list[Row]] = {}
        self._pace = Pace(settings.max_in_flight or 1)
        self._wake = asyncio.Event()
        self._encode_wake = asyncio.Event()

    def add(self, rows: Iterable[Row]) -> None:
        """Take rows that are not tokenized yet."""
        self._raw.extend(rows)
        self._encode_wake.set()

    @property
    def is_waiting(self) -> bool:
        """True while the model or its server is away: rows wait, and that is no stall."""
        return self._server.is_waiting

    @property
    def paused(self) -> bool:
        """Whether no request may begin."""
        return self._server.paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._server.paused = paused
        self._wake.set()

    @property
    def busy(self) -> bool:
        """Whether any row is here."""
        waits = self._raw or self._encoding or self._backlog or self._parts
        return bool(waits or self._in_flight or self._suspects.busy)

    @property
    def at_model(self) -> int:
        """How many rows are at Triton now."""
        return self._server.rows_at_model

    def rows_in_flight(self) -> list[Row]:
        """Return the rows that are at Triton now, or whose failure there is still being judged."""
        return [*(row for rows in self._in_flight.values() for row in rows), *self._suspects.lone]

    def waiting(self) -> tuple[int, float | None]:
        """Return how many rows wait, and the arrival of the oldest."""
        parts = [row for rows in self._parts for row in rows]
        ages = [queue[0].arrived_s for queue in (self._raw, self._suspects.waiting, parts) if queue]
        ages += [age for age in (self._backlog.oldest_s(),) if age is not None]
        return len(self._raw) + len(self._backlog) + len(parts) + len(self._suspects), min(ages, default=None)

    def drop_dead(self) -> None:
        """Forget the rows nobody waits for any more."""
        self._raw = deque(row for row in self._raw if row.alive)
        self._suspects.drop_dead()
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
                await happens(self._wake, LOOK_AGAIN_S)
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
                self._encoding = len(rows)
                errors = await asyncio.to_thread(encode_rows, model, rows, self._settings.max_text_chars)
                crashpoint("after_tokenize")
                self._sort_encoded(rows, errors)
                self._encoding = 0
            await happens(self._encode_wake, LOOK_AGAIN_S)

    def _sort_encoded(self, rows: list[Row], errors: list[RowError | None]) -> None:
        for row, error in zip(rows, errors, strict=True):
            if not row.alive:
                continue
            if error is not None:
                row.finish(error)
                self._progress(1)
            elif row.is_suspect:
                self._suspects.add([row])
            else:
                self._backlog.add(row)
        self._wake.set()

    # -- which request is next ----------------------------------------------------------------------------------------

    def _model(self) -> Model | None:
        """Return the version, or None while it is away.

        Rows of a model that was deleted get their error, rows that any version may answer go back where another one is
        there; those that have pinned this one wait: whether it is gone for good is for others to say.
        """
        try:
            return self._server.get()
        except UnknownModel as error:
            rows = self._take_unpinned()
            for row in rows:
                row.finish(error)
            self._progress(len(rows))
        except VersionGone:
            if rows := self._take_unpinned():
                self._hand_over(rows)
        except DependencyDown:
            pass
        return None

    def _take_unpinned(self) -> list[Row]:
        rows = [*self._raw, *self._suspects.waiting, *(row for part in self._parts for row in part)]
        self._raw.clear()
        self._suspects.waiting.clear()
        self._parts.clear()
        while batch := self._backlog.take(ENCODE_ROWS, 2**31, float("inf")):
            rows += batch
        self._raw.extend(row for row in rows if row.alive and row.version is not None)
        return [row for row in rows if row.alive and row.version is None]

    async def _step(self) -> None:
        """Start as many requests as may be in flight."""
        while not self.paused and (self._backlog or self._parts or self._suspects):
            model = self._model()
            if model is None or not self._server.bulk_ready():
                self._server.is_waiting = True
                return
            if self.is_waiting:
                if self._in_flight or not await self._recovered():
                    return
            elif not await self._server.know_cost(model):
                self._wake.set()
                return
            elif self._suspects:
                if self._in_flight:
                    return
                if self._fresh(model, [self._suspects.waiting[0]]):
                    await self._suspects.run_next(model)
                else:
                    self._suspects.waiting.popleft()
            elif len(self._in_flight) < self._pace.of(self._server.most_in_flight(model)) and (
                rows := self._next_rows(model)
            ):
                self._start(model, rows)
            else:
                return

    async def _recovered(self) -> bool:
        if await self._server.recover():
            return True
        self._wake.set()
        return False

    def _next_rows(self, model: Model) -> list[Row]:
        settings = self._settings
        while self._parts or self._backlog:
            if self._parts:
                rows = self._parts.popleft()
            else:
                most = min(settings.max_microbatch_rows, model.spec.max_batch_rows)
                padding = MAX_PADDING_GPU if model.spec.on_gpu else MAX_PADDING_CPU
                rows = self._backlog.take(most, self._server.most_tokens(model), padding, self._server.fits)
            if rows := self._fresh(model, rows):
                return rows
        return []

    def _fresh(self, model: Model, rows: list[Row]) -> list[Row]:
        """Keep the rows that somebody waits for and that this version's tokenizer made; the others go back."""
        old = [row for row in rows if row.alive and row.tokenizer != model.spec.tokenizer_sha256]
        if old:
            self.add(old)
        return [row for row in rows if row.alive and row.tokenizer == model.spec.tokenizer_sha256]

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
            self._server.is_waiting = True
            self.add(rows)

    async def _run_request(self, model: Model, rows: list[Row]) -> None:
        if self.paused:
            # The pause came before this task had begun: nothing of it was told as in flight, so nothing may begin.
            self._parts.append(rows)
            return
        try:
            outcomes = await self._server.infer(model, rows)
        except TwodoorError as error:
            self._request_failed(rows, error)
            return
        self._pace.succeeded()
        self._deliver(rows, outcomes)

    def _request_failed(self, rows: list[Row], error: TwodoorError) -> None:
        fault = verdict.fault_of(error)
        step = verdict.after_request(fault, len(rows))
        self._server.retried(fault)
        if step is Step.CONDEMN:
            self._deliver(rows, [verdict.sentence(fault, error)])
        elif step is Step.SPLIT:
            if fault is Fault.LATE:
                # The request may still run: whatever goes behind it now would be late as well.
                self._server.wait(fault, error)
            self._parts.extend(verdict.halves(rows))
        elif step is Step.RUN_ALONE:
            self._suspects.add(rows)
        elif step is Step.SLOW_DOWN:
            self._pace.refused()
            self._parts.append(rows)
            self._server.is_waiting = True
        else:
            self._server.wait(fault, error)
            if step is Step.WAIT_AND_SUSPECT:
                self._suspects.add(rows)
            else:
                self._parts.append(rows)

    def _deliver(self, rows: list[Row], outcomes: Iterable[Outcome]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            row.finish(outcome)
        self._progress(len(rows))
