"""The job's side of the demo: the rows go in as a file of JSON lines, and the results come back as one."""

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path

from twodoor.client import AsyncClient
from twodoor.demo.bulk import NO_PROGRESS_S, NoProgress
from twodoor.demo.tally import Records, miscounted
from twodoor.job_records import Job

EVERY_S = 0.5


class JobRun:
    """One job over the given rows, and what came of it."""

    def __init__(self, client: AsyncClient, records: Records) -> None:
        self.done = 0
        self.ended_at = 0.0
        self._client = client
        self._records = records
        self._problems: list[str] = []

    async def run(self) -> None:
        """Submit, wait for the end and count the results; raises NoProgress where nothing goes on any more."""
        job = await self._submit()
        job = await self._until_ended(job)
        self.ended_at = asyncio.get_running_loop().time()
        if job.status != "completed":
            self._problems.append(f"the job ended as {job.status}")
        lines: list[tuple[int, bool]] = []
        async for row in self._client.results(job.id):
            self._records.add(row.raw)
            lines.append((row.index, "error" in row.raw))
        self._problems += miscounted(asdict(job.rows), lines, len(self._records.texts))

    def problems(self) -> list[str]:
        """Return what is wrong with the job itself; its rows are judged by their records."""
        return self._problems

    async def _submit(self) -> Job:
        with tempfile.TemporaryDirectory(prefix="twodoor-demo-") as folder:
            file = Path(folder) / "rows.jsonl"
            await asyncio.to_thread(write_lines, file, self._records.texts)
            return await self._client.submit_job(file, metadata={"from": "twodoor demo"})

    async def _until_ended(self, job: Job) -> Job:
        loop = asyncio.get_running_loop()
        progress_at = loop.time()
        async with aclosing(self._client.watch_job(job.id, every_s=EVERY_S)) as states:
            async for now in states:
                job, done = now, now.rows.total - now.rows.pending
                if done > self.done:
                    self.done, progress_at = done, loop.time()
                elif loop.time() - progress_at > NO_PROGRESS_S:
                    raise NoProgress(f"the job stands still for {NO_PROGRESS_S:.0f} s after {self.done:,} rows")
        return job


def write_lines(file: Path, texts: Mapping[str, str]) -> None:
    """Write one JSON line for each id and text."""
    with file.open("w", encoding="ascii") as lines:
        lines.writelines(json.dumps({"id": row_id, "text": text}) + "\n" for row_id, text in texts.items())
