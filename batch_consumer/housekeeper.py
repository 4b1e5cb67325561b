"""The duties of jobs nobody else owns: close, expire, notify, fail what cannot run, clear away, sweep, forget."""

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

import structlog

from batch_consumer.duties import Duty, Rounds
from batch_consumer.gone import GoneModels, Models, Wanted
from batch_consumer.metrics import Metrics
from batch_consumer.sweep import Orphans, empty
from batch_consumer.transitions import log_transition, open_status
from jobs.ledger import Ledger
from jobs.objects import Objects
from jobs.records import Notification
from jobs.states import CLOSES_AS
from serving.crashpoint import crashpoint
from serving.settings import ConsumerSettings, JobsSettings

log = structlog.get_logger(__name__)

PAGE = 100
GARBAGE_PAGE = 8
GARBAGE_LEASE_S = 30.0
GAUGE_INTERVAL_S = 5.0
RARE_INTERVAL_S = 60.0
SWEEP = "sweep"

_BEFORE = {after: before for before, after in CLOSES_AS.items()}


class SeenModels(Models, Protocol):
    """The registry, as far as the housekeeper asks it."""

    triton_up: bool
    seen: asyncio.Event


class Announcer(Protocol):
    """The events topic, as far as the housekeeper writes to it."""

    async def connect(self) -> None:
        """Raise DependencyDown where Kafka is away."""
        ...

    async def announce(self, notifications: Sequence[Notification]) -> None:
        """Tell them; returns once they are kept."""
        ...


class Housekeeper:
    """One of them runs in each consumer; the ledger's leases and compare-and-sets let them work side by side."""

    def __init__(
        self,
        consumer: str,
        ledger: Ledger,
        objects: Objects,
        registry: SeenModels,
        events: Announcer,
        settings: ConsumerSettings,
        jobs: JobsSettings,
        metrics: Metrics,
    ) -> None:
        self._me = consumer
        self._ledger = ledger
        self._objects = objects
        self._registry = registry
        self._events = events
        self._settings = settings
        self._jobs = jobs
        self._metrics = metrics
        self._gone = GoneModels(jobs.model_gone_s)
        self._stop = asyncio.Event()
        self._rounds = self._make_rounds()

    def _make_rounds(self) -> Sequence[Rounds]:
        """A loop for each part that may be away, so that the others' duties do not wait for it."""
        often_s, most_s = self._settings.duty_interval_s, self._settings.retry_backoff_max_s
        rarely_s = min(RARE_INTERVAL_S, 10 * often_s)
        look_s = min(max(often_s, self._jobs.model_gone_s / 10), GAUGE_INTERVAL_S)
        sweep_s = min(max(often_s, self._jobs.sweep_interval_s / 10), RARE_INTERVAL_S)
        ledger = [
            Duty("close", self._close, often_s, most_s),
            Duty("expire", self._expire, often_s, most_s),
            Duty("upload", self._give_up_uploads, often_s, most_s),
            Duty("retire", self._retire, often_s, most_s),
            Duty("model", self._fail_gone, look_s, most_s),
            Duty("forget", self._forget, rarely_s, most_s),
            Duty("gauge", self._count, GAUGE_INTERVAL_S, most_s),
        ]
        objects = [
            Duty("garbage", self._clear_garbage, often_s, most_s),
            Duty(SWEEP, self._sweep, sweep_s, most_s),
        ]
        events = [Duty("notification", self._notify, often_s, most_s)]
        return Rounds("ledger", ledger), Rounds("objects", objects), Rounds("events", events)

    def nudge(self) -> None:
        """A chunk is done: its job may be closed now rather than at the next look."""
        self._rounds[0].hasten("close")

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``, then finish the pages that run, within half of the drain time."""
        loops = [asyncio.create_task(one.run(self._stop), name=f"housekeeper {one.name}") for one in self._rounds]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopping, *loops], return_when=asyncio.FIRST_COMPLETED)
            self._stop.set()
            for one in self._rounds:
                one.wake()
            await asyncio.wait(loops, timeout=self._settings.drain_timeout_s / 2)
        finally:
            for task in (*loops, stopping):
                task.cancel()
            await asyncio.wait([*loops, stopping], timeout=self._settings.drain_timeout_s / 2)
        for loop in loops:
            if loop.done() and not loop.cancelled():
                loop.result()

    # -- the ledger alone ---------------------------------------------------------------------------------------------

    async def _close(self) -> bool:
        closed = await self._ledger.close_due(PAGE)
        if closed:
            crashpoint("after_close")
            self._rounds[2].hasten("notification")
        for job in closed:
            log_transition(job, _BEFORE.get(job.status))
        return len(closed) == PAGE

    async def _expire(self) -> bool:
        expiring = await self._ledger.expire_due(PAGE)
        for job in expiring:
            log_transition(job, open_status(job))
        return len(expiring) == PAGE

    async def _give_up_uploads(self) -> bool:
        given_up = await self._ledger.take_expired_uploads(PAGE)
        if given_up:
            log.info("uploads given up", count=len(given_up), first=given_up[0])
        return len(given_up) == PAGE

    async def _retire(self) -> bool:
        retired = await self._ledger.retire_due(PAGE)
        for job in retired:
            log.info("job removed", job=job.id, status=job.status.value, tenant=job.tenant, rows=job.rows_total)
        return len(retired) == PAGE

    async def _forget(self) -> bool:
        return await self._ledger.forget_due(PAGE, self._jobs.idempotency_ttl_s) >= PAGE

    async def _count(self) -> bool:
        for duty, waiting in (await self._ledger.duties()).items():
            self._metrics.duties.labels(duty).set(waiting)
        return False

    async def _fail_gone(self) -> bool:
        """Fail a page of jobs for each model that is gone for good."""
        wanted = await self._ledger.wanted()
        if not (self._registry.triton_up and self._registry.seen.is_set()):
            self._gone.forget()
            return False
        more = False
        for gone in self._gone.look(wanted, self._registry, time.monotonic()):
            more = await self._fail_jobs(gone) or more
        return more

    async def _fail_jobs(self, gone: Wanted) -> bool:
        jobs = await self._ledger.jobs_wanting(gone.model, gone.version, PAGE)
        for job in jobs:
            if (failing := await self._ledger.fail(job, gone.code, gone.message)) is not None:
                log_transition(failing, open_status(failing))
        return len(jobs) == PAGE

    # -- objects ------------------------------------------------------------------------------------------------------

    async def _clear_garbage(self) -> bool:
        """Delete what lies under a few prefixes; what is too much for one lease goes on under the next."""
        end_s = time.monotonic() + GARBAGE_LEASE_S / 2
        prefixes = await self._ledger.take_garbage(self._me, GARBAGE_PAGE, GARBAGE_LEASE_S)

        def may_go_on() -> bool:
            return time.monotonic() < end_s and not self._stop.is_set()

        for prefix in prefixes:
            if not may_go_on() or not await empty(self._objects, prefix, may_go_on):
                return False
            await self._ledger.drop_garbage([prefix])
        return len(prefixes) == GARBAGE_PAGE

    async def _sweep(self) -> bool:
        interval_s = self._jobs.sweep_interval_s
        # One that fails or is killed in the middle is begun anew when its lease is over.
        lease_s = min(max(interval_s, 30.0), 600.0)
        if not await self._ledger.take_duty(SWEEP, self._me, interval_s, lease_s):
            return False
        orphans = Orphans(self._ledger, self._objects, self._jobs.orphan_grace_s, lambda: datetime.now(UTC))
        if await orphans.sweep(lambda: not self._stop.is_set()):
            await self._ledger.end_duty(SWEEP, self._me)
            log.info("sweep", objects=orphans.seen, deleted=orphans.deleted)
        return False

    # -- the events topic ---------------------------------------------------------------------------------------------

    async def _notify(self) -> bool:
        """Tell what is due. Kafka is asked first: with Kafka away nothing is leased, and is told as soon as it is back."""
        await self._events.connect()
        lease_s = 2 * self._settings.kafka_timeout_s + 5
        due = await self._ledger.take_notifications(self._me, PAGE, lease_s)
        if due:
            await self._events.announce(due)
            crashpoint("after_notify")
            await self._ledger.drop_notifications([notification.id for notification in due])
        return len(due) == PAGE
