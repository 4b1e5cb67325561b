"""The topic door: one Kafka consumer after the other, and whether Kafka is there and how far it is read."""

import asyncio

import structlog

from batch_consumer.broker import Trouble
from batch_consumer.owned import Parts
from batch_consumer.pace import Backoff
from batch_consumer.session import Session
from batch_consumer.waiting import happens
from serving.errors import DependencyDown

log = structlog.get_logger(__name__)

LOOKS_PER_FACTS = 10


class TopicDoor:
    """Reads the request topic until told to stop; Kafka going away only makes it wait."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._session: Session | None = None
        self._told_away = False
        self._looks = 0
        self._told_too_small = False
        self.is_up = False
        """Whether Kafka answered when it was asked last."""
        self.lag: int | None = None
        """Records not yet committed by this consumer, or None while that is not known."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``; then finish what runs, commit it and leave the group.

        Raises ConfigError where the first look at the topics shows that records could be passed over.
        """
        backoff = Backoff(self._settings.retry_backoff_max_s)
        checked = False
        while not stop.is_set():
            try:
                await self._parts.facts.refresh()
                if not checked:
                    self._parts.facts.check()
                    checked = True
                self._back()
                await self._run_session(stop)
                backoff.reset()
            except (DependencyDown, *Trouble) as error:
                self._away(error)
                await happens(stop, backoff.next_s())
        self.is_up = False

    async def _run_session(self, stop: asyncio.Event) -> None:
        session = Session(self._parts)
        self._session = session
        reader = asyncio.create_task(session.run(stop), name="topic session")
        try:
            while not reader.done():
                await asyncio.wait([reader], timeout=self._settings.kafka_check_interval_s)
                await self._look(session)
            await reader
        finally:
            self._session = None
            reader.cancel()
            await asyncio.wait([reader])

    async def _look(self, session: Session) -> None:
        """Ask Kafka how far its partitions are: that gives readiness and lag."""
        try:
            self.lag = await session.measure_lag()
            await self._ask_facts()
        except (DependencyDown, *Trouble) as error:
            self.lag = None
            self._away(error)
            session.look_at_closed(False)
            return
        session.look_at_closed(True)
        self._parts.metrics.lag.labels(self._parts.kafka.requests_topic).set(self.lag)
        self._back()

    async def _ask_facts(self) -> None:
        """Ask for the cluster's metadata, and now and then for the topics' limits: somebody may have raised them."""
        self._looks += 1
        if self._looks % LOOKS_PER_FACTS:
            await self._parts.broker.ping()
            return
        await self._parts.facts.refresh()
        too_small = self._parts.facts.fetch_is_too_small
        if too_small and not self._told_too_small:
            log.error("the request topic takes records larger than TWODOOR_CONSUMER_MAX_PARTITION_FETCH_BYTES")
        self._told_too_small = too_small
        self._parts.metrics.fetch_too_small.set(too_small)

    def _away(self, error: Exception) -> None:
        self.is_up = False
        if not self._told_away:
            self._told_away = True
            log.warning("kafka away", error=type(error).__name__, reason=str(error))

    def _back(self) -> None:
        self.is_up = True
        if self._told_away:
            self._told_away = False
            log.info("kafka back")

    @property
    def reads_nothing(self) -> bool:
        """Whether records could be read and none came for a long time: then the consumer itself is stuck."""
        return self._session is not None and self._session.is_stuck

    def restart(self) -> None:
        """End the consumer and make a new one."""
        if self._session is not None:
            self._session.end()
