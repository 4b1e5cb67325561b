"""Drives the bulk door from outside: a plain producer and a plain read_committed reader that checks every result."""

import asyncio
import itertools
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.callers import Expected

CONNECT_TIMEOUT_S = 30.0
FEED_ROWS = 200
FEED_INTERVAL_S = 0.05


@dataclass(slots=True)
class TopicRun:
    """One batch of records through the topic: when it was produced and when each result could be read."""

    begin_s: float
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def rows_per_s(self) -> float:
        """Rows a second from the moment before the first record was produced to the last result read.

        Counted from the first result it would be too many: while none could be read yet, rows of later ones were worked on.
        """
        return len(self.arrivals_s) / (self.arrivals_s[-1] - self.begin_s)


def made_by(arrivals_s: Sequence[float], at_s: float) -> float:
    """Return how many rows had been made at a moment, each group that arrived at once spread evenly since the one before."""
    times_s, counts = np.unique(np.asarray(arrivals_s, dtype=np.float64), return_counts=True)
    return float(np.interp(at_s, times_s, np.cumsum(counts), left=0.0)) if len(times_s) else 0.0


class TopicDriver:
    """Produces records and reads their results. Each id must come exactly once and with the right answer."""

    def __init__(
        self, bootstrap: str, topics: tuple[str, str], model: str, texts: Sequence[str], expected: Sequence[Expected]
    ) -> None:
        self._requests, self._results = topics
        self._model = model
        self._texts = texts
        self._expected = expected
        self._run = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._waiting: set[int] = set()
        self._partitions: list[int] = []
        self._producer: Any = AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5)
        self._reader: Any = AIOKafkaConsumer(
            bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False
        )
        self._task: asyncio.Task[None] | None = None
        self.arrivals_s: list[float] = []
        self.wrong: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await self._producer.start()
            await self._reader.start()
            self._partitions = sorted(await self._producer.partitions_for(self._requests))
            results = sorted(await self._producer.partitions_for(self._results))
            places = [TopicPartition(self._results, number) for number in results]
            self._reader.assign(places)
            await self._reader.seek_to_end(*places)
            for place in places:
                await self._reader.position(place)
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CONNECT_TIMEOUT_S)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await self._producer.stop()
            await self._reader.stop()

    @property
    def outstanding(self) -> int:
        """Records produced whose result has not been read."""
        return len(self._waiting)

    async def produce(self, rows: int) -> None:
        """Produce the next ``rows`` records, evenly over the partitions; returns when the broker has them."""
        sent = []
        for number in itertools.islice(self._numbers, rows):
            self._waiting.add(number)
            record = {
                "id": f"bench-{self._run}-{number}",
                "model": self._model,
                "text": self._texts[number % len(self._texts)],
            }
            partition = self._partitions[number % len(self._partitions)]
            sent.append(await self._producer.send(self._requests, orjson.dumps(record), partition=partition))
        await asyncio.gather(*sent)

    async def run(self, rows: int, timeout_s: float) -> TopicRun:
        """Send ``rows`` records through and wait for the last result; raises TimeoutError."""
        seen = len(self.arrivals_s)
        result = TopicRun(time.monotonic())
        async with asyncio.timeout(timeout_s):
            await self.produce(rows)
            await self.drain(timeout_s)
        result.arrivals_s = self.arrivals_s[seen:]
        return result

    async def drain(self, timeout_s: float) -> None:
        """Wait until every record has its result; raises TimeoutError, or what ended the reader."""
        async with asyncio.timeout(timeout_s):
            while self._waiting:
                await self._tick()

    async def _tick(self) -> None:
        """Let a moment pass; raises what ended the reader."""
        if self._task is not None and self._task.done():
            await self._task
        await asyncio.sleep(0.02)

    @asynccontextmanager
    async def saturated(self, backlog: int, drain_s: float) -> AsyncIterator[None]:
        """Keep at least ``backlog`` records waiting while the block runs, then let them drain."""
        enough = asyncio.Event()
        feeder = asyncio.create_task(self._feed(backlog, enough))
        seen = len(self.arrivals_s)
        try:
            async with asyncio.timeout(drain_s):
                while len(self.arrivals_s) < seen + min(backlog, 64) and not feeder.done():
                    await self._tick()
            yield
        finally:
            enough.set()
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await feeder
        await self.drain(drain_s)

    async def _feed(self, backlog: int, enough: asyncio.Event) -> None:
        while not enough.is_set():
            while self.outstanding < backlog:
                await self.produce(FEED_ROWS)
            await asyncio.sleep(FEED_INTERVAL_S)

    def rows_between(self, since_s: float, until_s: float) -> float:
        """Return how many results were made between two moments; to be asked when the topic has drained.

        Results become readable by transactions, which the window's edges cut: each one's rows count as made evenly since
        the one before. So no row counts for nothing, and a standstill within the window or over its edge lowers the rate.
        """
        return made_by(self.arrivals_s, until_s) - made_by(self.arrivals_s, since_s)

    async def _read(self) -> None:
        prefix = f"bench-{self._run}-"
        while True:
            fetched = await self._reader.getmany(timeout_ms=200, max_records=2_000)
            now_s = time.monotonic()
            for records in fetched.values():
                for record in records:
                    result = orjson.loads(record.value)
                    if str(result.get("id", "")).startswith(prefix):
                        self._check(int(result["id"][len(prefix) :]), result, now_s)

    def _check(self, number: int, result: dict[str, Any], now_s: float) -> None:
        if number not in self._waiting:
            self.wrong["more than one result"] += 1
            return
        self._waiting.discard(number)
        self.arrivals_s.append(now_s)
        output = result.get("output")
        if output is None:
            self.wrong[f"error {result.get('error', {}).get('code')}"] += 1
            return
        fault = self._expected[number % len(self._texts)].fault(output["label"] == "positive", output["score"])
        if fault:
            self.wrong[fault] += 1
