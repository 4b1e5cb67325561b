"""Finished records become what is written: one result each, or one dead letter, never both; nothing for a tombstone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from batch_consumer.metrics import UNKNOWN, Metrics
from batch_consumer.partition import Record
from batch_consumer.records import Headers, Request, Source, render
from batch_consumer.transactions import Outgoing
from serving.errors import RowError, TwodoorError

SKIPPED_TOMBSTONE = "tombstone"
SKIPPED_UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Target:
    """A topic to write to: how many partitions it has and how large one record may be."""

    topic: str
    partitions: int
    max_message_bytes: int

    def partition_of(self, source_partition: int) -> int:
        """Return the partition for a source partition's records.

        Always the same one for one source partition, so that a reader of it sees them in offset order.
        """
        return source_partition % self.partitions


def outgoing(records: Sequence[Record], results: Target, dead_letters: Target) -> list[Outgoing]:
    """Return what has to be written for a finished prefix, in its order; runs in a thread."""
    written = []
    for record in records:
        if record.unreadable is not None:
            arrived = Arrived(record.source, record.key, record.value, record.headers)
            written.append(dead_letter(arrived, record.unreadable, dead_letters))
        elif record.request is not None:
            written.append(_result(record, record.request, results))
    return written


def _result(record: Record, request: Request, target: Target) -> Outgoing:
    headers: list[tuple[str, bytes | None]] = [("content-type", request.form.value.encode())]
    headers += [(name, value.encode()) for name, value in record.trace.items()]
    outcomes = [outcome for outcome in record.outcomes if outcome is not None]
    partition = target.partition_of(record.source.partition)

    def write(key: bytes | None) -> Outgoing:
        frame = Outgoing(target.topic, partition, key, b"", tuple(headers)).size_bytes
        value = render(request, outcomes, record.source, target.max_message_bytes - frame)
        return Outgoing(target.topic, partition, key, value, tuple(headers))

    result = write(record.key)
    # A key that leaves no room even for an error is given up rather than the result.
    return result if result.size_bytes <= target.max_message_bytes else write(None)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A record as it came."""

    source: Source
    key: bytes | None
    value: bytes | None
    headers: Headers


def dead_letter(arrived: Arrived, reason: TwodoorError, target: Target) -> Outgoing:
    """Return the record as it came with its reason; a value that does not fit is cut, and says so."""
    source = arrived.source
    headers = list(arrived.headers)
    headers += [
        ("twodoor-error-code", reason.code.encode()),
        ("twodoor-error-message", str(reason).encode(errors="replace")),
        ("twodoor-source-topic", source.topic.encode()),
        ("twodoor-source-partition", str(source.partition).encode()),
        ("twodoor-source-offset", str(source.offset).encode()),
    ]
    partition = target.partition_of(source.partition)
    letter = Outgoing(target.topic, partition, arrived.key, arrived.value, tuple(headers))
    return letter if letter.size_bytes <= target.max_message_bytes else _cut(letter, len(arrived.headers), target)


def _cut(letter: Outgoing, own_headers: int, target: Target) -> Outgoing:
    """Return a letter that fits: a shorter value, and where that is not enough, no key and none of the record's headers.

    A producer may send far more than the limit, compressed. A letter that cannot be written would stop its partition.
    """
    key, value, headers = letter.key, letter.value or b"", letter.headers
    said: tuple[tuple[str, bytes | None], ...] = (("twodoor-value-bytes", str(len(value)).encode()),)

    def room() -> int:
        frame = Outgoing(target.topic, letter.partition, key, b"", headers + said)
        return target.max_message_bytes - frame.size_bytes

    if room() < 0:
        said += (("twodoor-key-bytes", str(len(key or b"")).encode()),)
        key = None
    if room() < 0:
        said += (("twodoor-headers-dropped", str(own_headers).encode()),)
        headers = headers[own_headers:]
    return Outgoing(target.topic, letter.partition, key, value[: max(0, room())], headers + said)


def count(records: Sequence[Record], metrics: Metrics, known_models: frozenset[str]) -> None:
    """Count what a committed prefix held: exactly what a reader of the topics sees."""
    for record in records:
        if record.is_tombstone:
            metrics.skipped.labels(SKIPPED_TOMBSTONE).inc()
        elif record.unreadable is not None:
            metrics.skipped.labels(SKIPPED_UNREADABLE).inc()
        elif record.request is not None:
            model = record.request.model if record.request.model in known_models else UNKNOWN
            outcomes = record.outcomes if record.request.error is None else [record.request.error]
            ends = Counter(outcome.code if isinstance(outcome, RowError) else "ok" for outcome in outcomes)
            for end, rows in ends.items():
                metrics.rows.labels("bulk", model, end).inc(rows)
