"""Rows under suspicion run alone: whose fault it was is found out with the canary before and after."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable

import structlog

from batch_consumer import verdict
from batch_consumer.rows import Outcome, Row
from batch_consumer.server import ModelServer
from batch_consumer.verdict import Fault, Step
from serving.errors import ModelNotReady, TwodoorError
from serving.registry import Model

log = structlog.get_logger(__name__)

# Before a row under which a process died runs again: two consumers whose rows shared one death must not share the next.
DEATH_JITTER_S = 2.0


class Suspects:
    """The suspects of one model version, oldest first. The lane calls ``run_next`` while nothing else is in flight."""

    def __init__(
        self, server: ModelServer, row_deaths: int, deliver: Callable[[list[Row], list[Outcome]], None]
    ) -> None:
        self._server = server
        self._row_deaths = row_deaths
        self._deliver = deliver
        self.waiting: deque[Row] = deque()
        self.lone: list[Row] = []
        """The row that runs alone now, until it has been judged."""
        self._is_running = False

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def busy(self) -> bool:
        """Whether any row is here."""
        return bool(self.waiting or self._is_running)

    def add(self, rows: Iterable[Row]) -> None:
        """Put rows under suspicion, unless they are already."""
        for row in rows:
            if not row.is_suspect:
                row.mark_suspect()
            self.waiting.append(row)

    def drop_dead(self) -> None:
        """Forget the rows nobody waits for any more."""
        self.waiting = deque(row for row in self.waiting if row.alive)

    async def run_next(self, model: Model) -> None:
        """Run the oldest alone, with the canary before and, if it fails, after it. Its tokens are those of ``model``."""
        self._is_running = True
        try:
            await self._run(model, self.waiting.popleft())
        finally:
            self._is_running = False

    async def _run(self, model: Model, row: Row) -> None:
        if row.deaths:
            await asyncio.sleep(random.uniform(0, DEATH_JITTER_S))  # noqa: S311 (jitter, no secret)
        if not await self._server.passes():
            self.waiting.appendleft(row)
            self._server.wait(Fault.LOST, ModelNotReady("the canary fails"))
            return
        if self._server.paused or not row.alive:
            self.waiting.appendleft(row)
            return
        self.lone = [row]
        try:
            outcomes = await self._server.infer(model, [row])
        except TwodoorError as error:
            await self._failed(row, error)
        else:
            self._deliver([row], outcomes)
        finally:
            self.lone = []

    async def _failed(self, row: Row, error: TwodoorError) -> None:
        fault = verdict.fault_of(error)
        self._server.retried(fault)
        if fault is Fault.LATE:
            row.late += 1
            row.mark_suspect()
        passes_after = await self._canary_after(fault, error, row)
        step = verdict.after_lone_request(fault, True, passes_after, row.late)
        if step is Step.CONDEMN:
            log.warning("row condemned", model=self._server.name, reason=fault.value)
            self._deliver([row], [verdict.sentence(fault, error)])
            return
        if step is Step.COUNT_DEATH and row.alive:
            row.mark_suspect(deaths=1)
            log.warning("model died under one row", model=self._server.name, deaths=row.deaths)
            if row.deaths >= self._row_deaths:
                self._deliver([row], [verdict.crashed(row.deaths)])
                return
        elif step in (Step.WAIT, Step.SLOW_DOWN):
            self._server.wait(fault, error)
        self.waiting.append(row)

    async def _canary_after(self, fault: Fault, error: TwodoorError, row: Row) -> bool:
        """Run the canary after a failure; where the model has to come back first, wait until it has, however long."""
        server = self._server
        if fault not in (Fault.LOST, Fault.LATE):
            return await server.passes()
        server.wait(fault, error)
        while row.alive and not server.is_lost_to(row):
            if server.bulk_ready() and not server.paused and await server.recover():
                return True
            await server.pause()
        return False
