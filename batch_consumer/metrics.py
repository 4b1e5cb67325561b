"""The consumer's metrics. No ids as labels; a model name that is not in the repository counts as ``unknown``."""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.dependency_gauge import DependencyGauge

UNKNOWN = "unknown"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_RATIOS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 4, 8)

Waiting = Mapping[str, tuple[int, float | None]]
"""Model → (rows waiting, arrival of the oldest on the monotonic clock)."""


class Metrics:
    """All counters of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rows = Counter(
            "twodoor_rows_total", "Rows answered.", ("lane", "model", "outcome"), registry=self.registry
        )
        self.microbatch_seconds = Histogram(
            "twodoor_bulk_microbatch_seconds",
            "Time of one micro-batch at Triton.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.padding_ratio = Histogram(
            "twodoor_bulk_padding_ratio",
            "Padded tokens for each real one in a micro-batch.",
            ("model",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self.lag = Gauge(
            "twodoor_topic_lag_records",
            "Records not yet committed by this consumer.",
            ("topic",),
            registry=self.registry,
        )
        self.retries = Counter("twodoor_retries_total", "Work done again.", ("reason",), registry=self.registry)
        self.skipped = Counter(
            "twodoor_records_skipped_total", "Records that gave no result.", ("reason",), registry=self.registry
        )
        self.offsets_lost = Counter(
            "twodoor_offsets_lost_total",
            "Times a partition's committed offset no longer existed.",
            registry=self.registry,
        )
        self.blocked = Gauge(
            "twodoor_partitions_blocked",
            "Partitions that stand still until an operator acts.",
            ("reason",),
            registry=self.registry,
        )
        self.fetch_too_small = Gauge(
            "twodoor_fetch_size_too_small",
            "1 while the request topic takes records larger than one fetch.",
            registry=self.registry,
        )
        self.fenced = Counter(
            "twodoor_producers_fenced_total",
            "Transactions another owner of the partition ended.",
            registry=self.registry,
        )

        self.duties = Gauge(
            "twodoor_duties_waiting", "Duties of jobs that wait, in the whole installation.", ("duty",),
            registry=self.registry,
        )  # fmt: skip

        self.leases_lost = Counter(
            "twodoor_leases_lost_total", "Claims of chunks that went to another consumer.", registry=self.registry
        )

        self._stalled = Gauge(
            "twodoor_consumer_stalled",
            "1 while there is work and none was finished for the stall timeout.",
            registry=self.registry,
        )
        self._paused = Gauge(
            "twodoor_bulk_paused", "1 while this consumer obeys a pause of bulk work.", registry=self.registry
        )

    def watch_process(
        self,
        is_stalled: Callable[[], bool],
        is_paused: Callable[[], bool],
        dependencies: Callable[[], Mapping[str, bool]],
    ) -> None:
        """Show what `/healthz` and `/readyz` say, and whether bulk work is paused."""
        self._stalled.set_function(is_stalled)
        self._paused.set_function(is_paused)
        self.registry.register(DependencyGauge(dependencies))

    def watch(self, waiting: Callable[[], Waiting]) -> None:
        """Report backlog and age from ``waiting`` whenever somebody reads the metrics."""
        self.registry.register(_Backlog(waiting))

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text form."""
        return generate_latest(self.registry)


class _Backlog(Collector):
    def __init__(self, waiting: Callable[[], Waiting]) -> None:
        self._waiting = waiting

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self._families({})

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return self._families(self._waiting())

    @staticmethod
    def _families(waiting: Waiting) -> list[GaugeMetricFamily]:
        rows = GaugeMetricFamily("twodoor_bulk_backlog_rows", "Rows that wait for the model.", labels=("model",))
        oldest = GaugeMetricFamily("twodoor_bulk_oldest_row_seconds", "Age of the oldest of them.", labels=("model",))
        now_s = time.monotonic()
        for model, (count, arrived_s) in waiting.items():
            rows.add_metric((model,), count)
            oldest.add_metric((model,), 0.0 if arrived_s is None else now_s - arrived_s)
        return [rows, oldest]
