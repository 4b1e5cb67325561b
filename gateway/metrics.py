"""The gateway's Prometheus metrics. No ids and no caller's words become labels."""

from collections.abc import Callable, Iterable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LANE = "interactive"


class Metrics:
    """All metrics of one app, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self.duration = Histogram(
            "twodoor_http_request_duration_seconds",
            "From a request's head to the end of its answer; code 499 = the caller left.",
            ("route", "code"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.admitted_tokens = Gauge(
            "twodoor_admitted_tokens", "Tokens admitted and not yet answered.", registry=self._registry
        )
        self.shed = Counter(
            "twodoor_shed_total",
            "Calls refused or dropped: tokens, bytes, uploads, downloads, queue_full, rate_limited, quota_exceeded, caller_gone.",
            ("reason",),
            registry=self._registry,
        )
        self._rows = Counter(
            "twodoor_rows_total", "Rows by how they ended.", ("lane", "model", "outcome"), registry=self._registry
        )

    def watch_admission(self, tokens: Callable[[], float]) -> None:
        """Let the gauge ask the admission itself, so that the two can never disagree."""
        self.admitted_tokens.set_function(tokens)

    def count_rows(self, model: str, outcomes: Iterable[str]) -> None:
        """Count rows; ``model`` must be one that exists, or ``unknown``."""
        for outcome in outcomes:
            self._rows.labels(_LANE, model, outcome).inc()

    def render(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._registry)
