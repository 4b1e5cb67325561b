"""Plain producers and readers of the topics for end-to-end tests: what a user's own program would do."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

REQUESTS, RESULTS, DLQ = "twodoor.requests", "twodoor.results", "twodoor.requests.dlq"


@dataclass(frozen=True, slots=True)
class Read:
    """One result as it was read: where it lay and what it said."""

    partition: int
    offset: int
    value: Mapping[str, Any]


async def produce(bootstrap: str, records: Iterable[Mapping[str, Any]]) -> int:
    """Send records as JSON, acknowledged by Kafka before this returns; returns how many."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, linger_ms=5) as producer:
        sent = [await producer.send(REQUESTS, json.dumps(record).encode()) for record in records]
        await asyncio.wait_for(asyncio.gather(*sent), 60)
        return len(sent)


async def results_end(bootstrap: str) -> dict[int, int]:
    """Return partition → end offset of the result topic: where a test's own results begin."""
    async with _reader(bootstrap) as consumer:
        ends = await consumer.end_offsets(consumer.assignment())
        return {tp.partition: offset for tp, offset in ends.items()}


async def read_results(bootstrap: str, start: Mapping[int, int], ids: set[str], timeout_s: float) -> list[Read]:
    """Read results from ``start`` on until each id was seen and then to the end; nothing is deduplicated.

    Raises AssertionError that names missing ids after ``timeout_s``.
    """
    found: list[Read] = []
    async with _reader(bootstrap) as consumer:
        for tp in consumer.assignment():
            consumer.seek(tp, start.get(tp.partition, 0))
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        missing = set(ids)
        quiet = 0
        # Two empty reads in a row after the last id: a second copy of a result would be there by then.
        while missing or quiet < 2:
            batches = await consumer.getmany(timeout_ms=500)
            quiet = 0 if batches else quiet + 1
            for tp, messages in batches.items():
                for message in messages:
                    value = json.loads(message.value)
                    found.append(Read(tp.partition, message.offset, value))
                    missing.discard(value["id"])
            assert loop.time() < end_s, (
                f"{len(missing)} of {len(ids)} results missing after {timeout_s:g} s: {sorted(missing)[:5]}"
            )
    return [read for read in found if read.value["id"] in ids]


def assert_each_once_in_order(found: list[Read], ids: set[str]) -> None:
    """Each id has exactly one result, and the results of a source partition come in its offset order."""
    counts: dict[str, int] = defaultdict(int)
    by_source: dict[int, list[int]] = defaultdict(list)
    for read in sorted(found, key=lambda read: (read.partition, read.offset)):
        counts[read.value["id"]] += 1
        by_source[read.value["source"]["partition"]].append(read.value["source"]["offset"])
    assert counts.keys() == ids
    assert {identifier: count for identifier, count in counts.items() if count != 1} == {}
    for partition, offsets in by_source.items():
        assert offsets == sorted(offsets), f"results of source partition {partition} are out of order"


def _reader(bootstrap: str) -> AIOKafkaConsumer:
    """A reader without a group: it is assigned every partition of the topic."""
    return AIOKafkaConsumer(
        RESULTS, bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False, auto_offset_reset="earliest"
    )  # fmt: skip
