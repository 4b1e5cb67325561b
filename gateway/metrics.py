"""The gateway's Prometheus metrics. No ids and no caller's words become labels."""

from collections.abc import Callable, Iterable, Mapping

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

from gateway.demand import Demand
from serving.dependency_gauge import DependencyGauge

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_LANE = "interactive"


class Metrics:
    """All metrics of one app, in a registry of their own."""

    def __init__(self, demand_window_s: float = 60.0) -> None:
        self._registry = CollectorRegistry()
        self.demand = Demand(demand_window_s)
        self._registry.register(self.demand)
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
        self.admitted_rows = Gauge(
            "twodoor_admitted_rows", "Rows admitted and not yet answered.", registry=self._registry
        )
        self.connections = Gauge("twodoor_open_connections", "Connections open now.", registry=self._registry)
        self.shed = Counter(
            "twodoor_shed_total",
            "Calls refused or dropped: rows, tokens, deadline, promised, connections, bytes, uploads, downloads, queue_full, rate_limited, quota_exceeded, caller_gone.",
            ("reason",),
            registry=self._registry,
        )
        self.keys_stale = Gauge(
            "twodoor_keys_stale",
            "1 while the keys file could not be read again and the old keys stay in use.",
            registry=self._registry,
        )
        self.stream_connections = Gauge(
            "twodoor_stream_connections", "WebSockets of the stream that are open.", registry=self._registry
        )
        self.stream_messages = Counter(
            "twodoor_stream_messages_total",
            "Messages of the stream by how they ended: ok, the error's code, or caller_gone.",
            ("outcome",),
            registry=self._registry,
        )
        self.stream_seconds = Histogram(
            "twodoor_stream_message_duration_seconds",
            "From the arrival of a message of the stream to the end of its answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._rows = Counter(
            "twodoor_rows_total", "Rows by how they ended.", ("lane", "model", "outcome"), registry=self._registry
        )
        # Looked up at every call, which the library does slowly.
        self._rows_of: dict[tuple[str, str], Counter] = {}
        self._duration_of: dict[tuple[str, int], Histogram] = {}

    def watch_admission(self, rows: Callable[[], float], tokens: Callable[[], float]) -> None:
        """Let the gauges ask the admission itself, so that they can never disagree."""
        self.admitted_rows.set_function(rows)
        self.admitted_tokens.set_function(tokens)

    def watch_keys(self, are_stale: Callable[[], bool]) -> None:
        """Show whether the keys in use are older than their file."""
        self.keys_stale.set_function(are_stale)

    def watch_dependencies(self, dependencies: Callable[[], Mapping[str, bool]]) -> None:
        """Show the values of `/readyz`; once for an app."""
        self._registry.register(DependencyGauge(dependencies))

    def count_rows(self, model: str, outcomes: Iterable[str]) -> None:
        """Count rows; ``model`` must be one that exists, or ``unknown``."""
        for outcome in outcomes:
            counter = self._rows_of.get((model, outcome))
            if counter is None:
                counter = self._rows_of[model, outcome] = self._rows.labels(_LANE, model, outcome)
            counter.inc()

    def request_took(self, route: str, status: int, seconds: float) -> None:
        """Note a request; ``route`` is a template's name, never a caller's path."""
        histogram = self._duration_of.get((route, status))
        if histogram is None:
            histogram = self._duration_of[route, status] = self.duration.labels(route, str(status))
        histogram.observe(seconds)

    def render(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._registry)
