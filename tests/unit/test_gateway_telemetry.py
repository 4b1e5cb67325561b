"""Trace context goes on although nothing is exported."""

from serving.telemetry import extract_context, inject_headers, span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_callers_context_is_carried_on_without_an_exporter_and_ends_with_the_block() -> None:
    with span("request", extract_context({"traceparent": PARENT})), span("call"):
        assert inject_headers()["traceparent"].split("-")[1] == PARENT.split("-")[1]
    assert inject_headers() == {}


def test_a_broken_traceparent_is_no_context() -> None:
    for broken in ("", "00-zz-zz-01", "x" * 10_000):
        with span("request", extract_context({"traceparent": broken})):
            assert inject_headers().get("traceparent", "00-").startswith("00-")
