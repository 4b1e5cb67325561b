"""Drives the job API from outside: submit JSONL, wait for the end, check every line of the results."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import orjson

from benchmarks.callers import Expected

# How often a job is asked for: often at first, then by a hundredth of its time, since asking costs what is measured.
POLL_S, POLL_MAX_S, POLL_SHARE = 0.02, 0.25, 0.01
CALL_TIMEOUT_S = 60.0
ENDED = ("completed", "failed", "cancelled", "expired")
BLOCK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class JobRun:
    """One job: the moments, on the monotonic clock, before its first byte was sent, of its 202, and of its end as seen."""

    id: str
    rows: int
    begin_s: float
    accepted_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """From before the first byte to the end."""
        return self.end_s - self.begin_s

    @property
    def rows_per_s(self) -> float:
        """Rows a second from before the first byte to the end."""
        return self.rows / self.seconds


class JobDriver:
    """A caller of the job API. ``key`` is an API key where the gateway asks for one."""

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._model = model
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=CALL_TIMEOUT_S, trust_env=False)
        self.wrong: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def submit(self, texts: Sequence[str], rows: int) -> str:
        """Submit ``rows`` lines, the texts again and again; returns the job's id."""

        async def body() -> Any:
            for block in _blocks(texts, rows):
                yield block

        reply = await self._http.post(
            "/v1/jobs", params={"model": self._model}, content=body(), headers={"Content-Type": "application/jsonl"}
        )
        reply.raise_for_status()
        return str(reply.json()["id"])

    async def get(self, job_id: str) -> Mapping[str, Any]:
        """Return the job as it stands."""
        reply = await self._http.get(f"/v1/jobs/{job_id}")
        reply.raise_for_status()
        job: Mapping[str, Any] = reply.json()
        return job

    async def wait(self, job_id: str, timeout_s: float) -> Mapping[str, Any]:
        """Wait for the job's end; raises TimeoutError."""
        begin_s = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while (job := await self.get(job_id))["status"] not in ENDED:
                passed_s = time.monotonic() - begin_s
                await asyncio.sleep(min(POLL_MAX_S, max(POLL_S, POLL_SHARE * passed_s)))
            return job

    async def run(self, texts: Sequence[str], rows: int, timeout_s: float) -> JobRun:
        """Submit and wait; a job that ends in any way but completed counts as wrong."""
        begin_s = time.monotonic()
        job_id = await self.submit(texts, rows)
        accepted_s = time.monotonic()
        job = await self.wait(job_id, timeout_s)
        if job["status"] != "completed":
            self.wrong[f"job ended as {job['status']}"] += 1
        return JobRun(job_id, rows, begin_s, accepted_s, time.monotonic())

    async def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        (await self._http.post(f"/v1/jobs/{job_id}/cancel")).raise_for_status()

    async def delete(self, job_id: str) -> None:
        """Delete an ended job."""
        (await self._http.delete(f"/v1/jobs/{job_id}")).raise_for_status()

    async def check(self, run: JobRun, expected: Sequence[Expected] | None = None) -> None:
        """Read the results: exactly one line for each row, in order, and the right answer where it is known."""
        number = 0
        async with self._http.stream("GET", f"/v1/jobs/{run.id}/results") as reply:
            reply.raise_for_status()
            left = b""
            async for block in reply.aiter_raw():
                *lines, left = (left + block).split(b"\n")
                for line in lines:
                    self._check_line(number, orjson.loads(line), expected)
                    number += 1
        if number != run.rows:
            self.wrong[f"{number} lines for {run.rows} rows"] += 1

    def _check_line(self, number: int, line: Mapping[str, Any], expected: Sequence[Expected] | None) -> None:
        if line["index"] != number:
            self.wrong["a line out of order"] += 1
        output = line.get("output")
        if output is None:
            self.wrong[f"error {line['error']['code']}"] += 1
        elif expected is not None:
            fault = expected[number % len(expected)].fault(output["label"] == "positive", output["score"])
            if fault:
                self.wrong[fault] += 1


def _blocks(texts: Sequence[str], rows: int) -> Iterator[bytes]:
    """Yield the JSONL body in blocks, so that a million rows are never in memory at once."""
    lines: list[bytes] = []
    size = 0
    for number in range(rows):
        line = orjson.dumps(texts[number % len(texts)]) + b"\n"
        lines.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            yield b"".join(lines)
            lines, size = [], 0
    yield b"".join(lines)
