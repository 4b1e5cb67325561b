"""Logs and traces of every process: structured lines on stderr, W3C trace context in and out."""

import contextvars
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points

import structlog
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from structlog.typing import Processor

from serving.errors import ConfigError
from serving.settings import TelemetrySettings

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACER = trace.get_tracer("twodoor")
_EXPORTERS = "opentelemetry_traces_exporter"


def configure_logging(settings: TelemetrySettings) -> None:
    """Send structlog's and the standard library's records to stderr, one line each, in one form."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())


@contextmanager
def tracing(settings: TelemetrySettings, service: str) -> Iterator[None]:
    """Export spans while the block runs, where an exporter is configured; without one nothing is recorded.

    Trace context is carried on either way. Raises ConfigError for an exporter that is not installed.
    """
    if not settings.trace_exporter:
        yield
        return
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings.trace_exporter)))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


def is_tracing() -> bool:
    """Return whether spans are recorded."""
    return isinstance(trace.get_tracer_provider(), TracerProvider)


def extract_context(headers: Mapping[str, str]) -> Context:
    """Return the trace context of a caller's ``traceparent`` (names in lower case); empty where there is none."""
    return _PROPAGATOR.extract(headers, context=Context())


def inject_headers() -> dict[str, str]:
    """Return the headers that carry the current span on to the next process; empty outside a trace."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers)
    return headers


@contextmanager
def span(
    name: str,
    context: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[contextvars.Context] = (),
) -> Iterator[Span]:
    """Run the block inside a span; ``context`` is the caller's, without it the current one is the parent.

    ``links`` are the contexts of others for whom the block works too: their spans are linked.

    Where nothing is exported no span is made (it would cost each call tens of microseconds), and the caller's context
    is only carried on.
    """
    if not is_tracing():
        token = attach(context) if context is not None else None
        try:
            yield trace.INVALID_SPAN
        finally:
            if token is not None:
                detach(token)
        return
    others = [Link(link.run(trace.get_current_span).get_span_context()) for link in links]
    with _TRACER.start_as_current_span(name, context=context, kind=kind, links=others) as current:
        yield current


def _exporter(name: str) -> SpanExporter:
    found = list(entry_points(group=_EXPORTERS, name=name))
    if not found:
        installed = ", ".join(sorted(entry_points(group=_EXPORTERS).names)) or "none"
        raise ConfigError(f"TWODOOR_LOG_TRACE_EXPORTER={name} is not installed; installed: {installed}")
    exporter = found[0].load()()
    if not isinstance(exporter, SpanExporter):
        raise ConfigError(f"TWODOOR_LOG_TRACE_EXPORTER={name} is no span exporter")
    return exporter
