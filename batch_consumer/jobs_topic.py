"""The door topic of jobs: one Kafka consumer after the other; Kafka going away only makes it wait."""

import asyncio

import structlog
from aiokafka import TopicPartition

from batch_consumer.broker import Broker, Trouble
from batch_consumer.events import Events
from batch_consumer.jobs_partition import JobsParts
from batch_consumer.jobs_records import JobsIntake, JobsRecords
from batch_consumer.jobs_session import JobsSession
from batch_consumer.metrics import Metrics
from batch_consumer.pace import Backoff
from batch_consumer.waiting import happens
from serving.errors import DependencyDown
from serving.settings import ConsumerSettings, JobsSettings, KafkaSettings

log = structlog.get_logger(__name__)


class JobsTopic:
    """Reads the jobs topic until told to stop. Its group is the consumer's with ``.jobs`` behind it."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: ConsumerSettings,
        jobs: JobsSettings,
        intake: JobsIntake,
        events: Events,
        metrics: Metrics,
    ) -> None:
        self._kafka = kafka
        self._settings = settings.model_copy(update={"group_id": f"{settings.group_id}.jobs"})
        self._metrics = metrics
        self._records = JobsRecords(settings, jobs, intake, events, metrics)
        self._committed: dict[TopicPartition, int] = {}
        self._told_away = False

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop``; then finish the records in hand, commit them and leave the group."""
        broker = Broker(self._kafka, self._settings)
        parts = JobsParts(self._kafka, self._settings, broker, self._metrics, self._records.take, self._committed)
        backoff = Backoff(self._settings.retry_backoff_max_s)
        try:
            while not stop.is_set():
                try:
                    session = JobsSession(parts, await self._fetch_bytes(broker))
                    self._back()
                    await session.run(stop)
                    backoff.reset()
                except (DependencyDown, *Trouble) as error:
                    self._away(error)
                    await happens(stop, backoff.next_s())
        finally:
            await broker.close()

    async def _fetch_bytes(self, broker: Broker) -> int:
        """Return a fetch size that holds whatever the topic takes; raises DependencyDown where there is no such topic."""
        topic = self._kafka.jobs_topic
        sizes = await broker.max_message_bytes([topic])
        await broker.partition_counts([topic])
        return max(self._settings.max_partition_fetch_bytes, sizes.get(topic, 0))

    def _away(self, error: Exception) -> None:
        if not self._told_away:
            self._told_away = True
            log.warning("jobs topic away", error=type(error).__name__, reason=str(error))

    def _back(self) -> None:
        if self._told_away:
            self._told_away = False
            log.info("jobs topic back")
