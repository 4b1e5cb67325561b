"""What is true of the topics now: partitions and sizes, asked again from time to time."""

import structlog

from batch_consumer.broker import Broker
from batch_consumer.results import Target
from serving.errors import ConfigError, DependencyDown
from serving.settings import ConsumerSettings, KafkaSettings

log = structlog.get_logger(__name__)


class TopicFacts:
    """Partitions and limits of the request, result and dead letter topics."""

    def __init__(self, kafka: KafkaSettings, settings: ConsumerSettings, broker: Broker) -> None:
        self._kafka = kafka
        self._settings = settings
        self._broker = broker
        self.results = Target(kafka.results_topic, 1, kafka.max_message_bytes)
        self.dead_letters = Target(kafka.dlq_topic, 1, kafka.max_message_bytes)
        self.request_max_bytes = 0

    async def refresh(self) -> None:
        """Ask Kafka; raises DependencyDown where it is away or a topic is missing."""
        results, dead, requests = self._kafka.results_topic, self._kafka.dlq_topic, self._kafka.requests_topic
        sizes = await self._broker.max_message_bytes([requests, results, dead])
        if missing := {requests, results, dead} - sizes.keys():
            raise DependencyDown(f"Kafka says nothing of topic {', '.join(sorted(missing))}")
        counts = await self._broker.partition_counts([results, dead])
        self.results = Target(results, counts[results], min(sizes[results], self._kafka.max_message_bytes))
        self.dead_letters = Target(dead, counts[dead], sizes[dead])
        self.request_max_bytes = sizes[requests]

    @property
    def fetch_is_too_small(self) -> bool:
        """Whether the request topic takes records that one fetch cannot hold: they could be passed over."""
        return self.request_max_bytes > self._settings.max_partition_fetch_bytes

    def check(self) -> None:
        """Raise ConfigError where the fetch size is under the topic's limit."""
        if self.fetch_is_too_small:
            raise ConfigError(
                f"topic {self._kafka.requests_topic} takes records of {self.request_max_bytes} bytes, but "
                f"TWODOOR_CONSUMER_MAX_PARTITION_FETCH_BYTES is {self._settings.max_partition_fetch_bytes}: "
                "raise it to at least the topic's max.message.bytes"
            )
