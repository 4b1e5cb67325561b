"""What was read becomes records with rows: parsing leaves the event loop's thread when it is much."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from batch_consumer.partition import Record, Window
from batch_consumer.records import Source, header, parse
from batch_consumer.rows import Row
from serving.errors import RowError
from serving.settings import ConsumerSettings
from serving.telemetry import extract_context, inject_headers, span


async def take_in(window: Window, messages: Sequence[Any], settings: ConsumerSettings) -> list[Row]:
    """Parse aiokafka's messages of one partition, add them to its window, and return their rows.

    Nothing is added to a window that was closed meanwhile.
    """
    records = [
        Record(
            window,
            Source(message.topic, message.partition, message.offset),
            message.key,
            message.headers,
            message.value,
        )
        for message in messages
    ]
    if sum(record.size_bytes for record in records) > settings.offload_bytes:
        await asyncio.to_thread(_parse_all, records, settings.max_rows_per_record)
    else:
        _parse_all(records, settings.max_rows_per_record)
    if not window.is_open:
        return []
    rows = [row for record in records for row in _rows(record)]
    window.add(records)
    return rows


def _parse_all(records: Iterable[Record], max_rows: int) -> None:
    for record in records:
        if record.value is None:
            continue
        try:
            record.expect(parse(record.value, record.headers, record.source, max_rows))
        except RowError as error:
            record.unreadable = error


def _rows(record: Record) -> list[Row]:
    request = record.request
    if request is None:
        return []
    record.trace = _continue_trace(record)
    rows = [
        Row(record, index, request.model, text, request.truncate, trace=record.trace)
        for index, text in enumerate(request.texts)
    ]
    for row in rows:
        deaths = record.window.suspects.get((record.source.offset, row.index))
        if deaths is not None:
            row.is_suspect, row.deaths = True, deaths
    return rows


def _continue_trace(record: Record) -> dict[str, str]:
    """Return the headers that carry the producer's trace on to Triton and into the result."""
    parent = header(record.headers, "traceparent")
    if parent is None:
        return {}
    state = header(record.headers, "tracestate")
    incoming = {"traceparent": parent} | ({"tracestate": state} if state else {})
    with span("twodoor.record", extract_context(incoming)):
        return inject_headers()
