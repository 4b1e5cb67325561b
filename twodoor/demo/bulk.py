"""The topic's side of the demo: the rows go into the topic, and a plain reader counts what comes out."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from twodoor import topics
from twodoor.config import ClientConfig
from twodoor.demo.tally import Records

NO_PROGRESS_S = 30.0
SEND_TIMEOUT_S = 30.0


class NoProgress(Exception):
    """The bulk door gave no result for too long."""


async def produce(config: ClientConfig, texts: Mapping[str, str]) -> None:
    """Send every row as a record of its own, the id as its key."""
    async with topics.started(config, topics.producer(config, linger_ms=5, compression_type="lz4")) as kafka:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            sent = []
            for row_id, text in texts.items():
                body = {"id": row_id, "model": config.default_model, "text": text}
                sent.append(await kafka.send(config.requests_topic, json.dumps(body).encode(), key=row_id.encode()))
            await asyncio.gather(*sent)


class Reader:
    """Counts results as anybody would: a read_committed consumer without a group, that knows nothing of duplicates."""

    def __init__(self, config: ClientConfig, records: Records) -> None:
        self.records = records
        self._config = config
        self.last_result_at = 0.0

    async def until_complete(self) -> None:
        """Read until each id has a result and the consumer has nothing left to do, then on to the topic's end.

        Raises NoProgress where nothing comes any more.
        """
        config = self._config
        async with topics.started(config, topics.reader(config)) as results:
            partitions = await topics.assign_all(results, config.results_topic)
            await self._read(results)
            await self._until_committed()
            # Whatever was written twice is committed by now: the count below this end is final.
            async for record in topics.read_to_end(results, partitions):
                self._add(record)

    async def _read(self, results: Any) -> None:
        loop = asyncio.get_running_loop()
        self.last_result_at = loop.time()
        while not self.records.complete:
            batch = await results.getmany(timeout_ms=200, max_records=500)
            for records in batch.values():
                for record in records:
                    self._add(record)
            if batch:
                self.last_result_at = loop.time()
            elif loop.time() - self.last_result_at > NO_PROGRESS_S:
                raise NoProgress(f"no result for {NO_PROGRESS_S:.0f} s, {self.records.answered:,} came before")

    async def _until_committed(self) -> None:
        """Wait until the consumer's group has committed every request: then no record can be worked on again."""
        config = self._config
        async with topics.started(config, topics.reader(config, config.group_id)) as group:
            partitions = await topics.assign_all(group, config.requests_topic)
            try:
                async with asyncio.timeout(NO_PROGRESS_S):
                    ends = await group.end_offsets(partitions)
                    for partition in partitions:
                        # Nobody tells of another group's commits: they can only be asked for.
                        while ends[partition] and (await group.committed(partition) or 0) < ends[partition]:  # noqa: ASYNC110
                            await asyncio.sleep(0.1)
            except TimeoutError:
                raise NoProgress(f"the consumer has not committed every record after {NO_PROGRESS_S:.0f} s") from None

    def _add(self, record: Any) -> None:
        self.records.add(json.loads(record.value))
