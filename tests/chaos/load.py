"""The load of one round: jobs by every way of sending, records, and calls; what was accepted and what came back."""

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from tests.chaos.texts import MODEL, SENTENCES, Answers, Line, job_lines
from tests.e2e.topics import REQUESTS

Send = Callable[[httpx.AsyncClient, str], Awaitable[httpx.Response]]
SUBMIT_S = 90.0
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class SentJob:
    """A job whose 202 was seen, and the line each of its rows was."""

    id: str
    lines: Sequence[Line]


@dataclass(slots=True)
class Load:
    """One round's load. ``run`` it beside the faults, ``end`` it after them."""

    url: str
    kafka: str
    answers: Answers
    dice: random.Random
    name: str
    jobs: list[SentJob] = field(default_factory=list)
    records: dict[str, str] = field(default_factory=dict)
    """Id → sentence of each record that Kafka has acknowledged."""
    calls: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    calls_in_flight: int = 0
    uploads_in_flight: int = 0
    unsent: int = 0
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def start(self) -> None:
        """Begin: jobs by three ways of sending one after the other, records a few at a time, two callers in a loop.

        Together somewhat less than the model can do, so that what a fault has held up is caught up with.
        """
        work = [
            self._again("fast", lambda name: self._submit_lines(name, 150, 0.0), 2.0),
            self._again("slow", lambda name: self._submit_lines(name, 60, 5.0), 0.0),
            self._again("inputs", lambda name: self._submit_inputs(name, 40), 2.0),
            self._again("records", lambda name: self.produce(name, 20), 0.3),
            self._call(),
            self._call(),
        ]
        self._tasks = [asyncio.create_task(one) for one in work]

    async def _again(self, kind: str, send: Callable[[str], Awaitable[None]], pause_s: float) -> None:
        """Send one after the other until the round's faults are over, at least twice."""
        number = 0
        while number < 2 or not self._ended.is_set():
            await send(f"{self.name}-{kind}{number}")
            number += 1
            await asyncio.sleep(pause_s)

    async def end(self) -> None:
        """Wait until everything is sent, and end the callers; raises what a task raised."""
        self._ended.set()
        await asyncio.wait_for(asyncio.gather(*self._tasks), SUBMIT_S + 60)

    # -- jobs -----------------------------------------------------------------------------------------------------------

    async def _submit_lines(self, name: str, count: int, seconds: float) -> None:
        lines = job_lines(self.dice, name, count)
        blocks = [b"".join(line.raw + b"\n" for line in lines[at : at + 10]) for at in range(0, len(lines), 10)]

        async def body() -> AsyncIterator[bytes]:
            for block in blocks:
                yield block
                await asyncio.sleep(seconds / len(blocks))

        async def send(client: httpx.AsyncClient, key: str) -> httpx.Response:
            return await client.post(
                "/v1/jobs", params={"model": MODEL}, content=body(),
                headers={"Content-Type": "application/jsonl", "Idempotency-Key": key},
            )  # fmt: skip

        await self._submit(name, lines, send)

    async def _submit_inputs(self, name: str, count: int) -> None:
        sentences = [self.dice.choice(SENTENCES) for _ in range(count)]
        lines = [Line(json.dumps(text).encode(), None, text) for text in sentences]

        async def send(client: httpx.AsyncClient, key: str) -> httpx.Response:
            headers = {"Idempotency-Key": key}
            return await client.post("/v1/jobs", json={"model": MODEL, "inputs": sentences}, headers=headers)

        await self._submit(name, lines, send)

    async def _submit(self, name: str, lines: Sequence[Line], send: Send) -> None:
        """Send until accepted, always with the same key: however often, it is one job."""
        key, ends = f"{name}-{uuid.uuid4().hex}", time.monotonic() + SUBMIT_S
        self.uploads_in_flight += 1
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=20, trust_env=False) as client:
                while time.monotonic() < ends:
                    with suppress(httpx.HTTPError):
                        reply = await send(client, key)
                        if reply.status_code == 202:
                            self.jobs.append(SentJob(reply.json()["id"], lines))
                            return
                        if reply.status_code not in (400, 429, 503, 504):
                            self.wrong.append(f"a submission got {reply.status_code}: {reply.text[:200]}")
                            return
                    await asyncio.sleep(PAUSE_S)
        finally:
            self.uploads_in_flight -= 1
        self.wrong.append(f"{name} was not accepted within {SUBMIT_S:g} s")

    def forget_records(self) -> None:
        """Count none of the records so far: Kafka has lost them."""
        self.records = {}

    def summary(self) -> str:
        """Return what was sent, in one line."""
        rows = sum(len(job.lines) for job in self.jobs)
        calls = ", ".join(f"{count} x {status}" for status, count in sorted(self.calls.items()))
        return (
            f"{len(self.jobs)} jobs of {rows} rows, {len(self.records)} records ({self.unsent} unsent), calls {calls}"
        )

    # -- records --------------------------------------------------------------------------------------------------------

    async def produce(self, prefix: str, count: int) -> None:
        """Send records; one that Kafka did not acknowledge is not counted, and not sent again under its id."""
        sentences = {f"{prefix}-{number}": self.dice.choice(SENTENCES) for number in range(count)}
        try:
            await asyncio.wait_for(self._send(sentences), 10)
        except (KafkaError, TimeoutError, OSError):
            self.unsent += len(sentences)
            await asyncio.sleep(PAUSE_S)

    async def _send(self, sentences: dict[str, str]) -> None:
        records = self.records  # those of before a wipe go to the list that is given up
        async with AIOKafkaProducer(bootstrap_servers=self.kafka, acks="all", request_timeout_ms=5_000) as producer:
            for identifier, sentence in sentences.items():
                value = json.dumps({"id": identifier, "model": MODEL, "text": sentence}).encode()
                await producer.send_and_wait(REQUESTS, value)
                records[identifier] = sentence

    # -- calls ----------------------------------------------------------------------------------------------------------

    async def _call(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=15, trust_env=False) as client:
            while not self._ended.is_set():
                sentence = self.dice.choice(SENTENCES)
                self.calls_in_flight += 1
                try:
                    reply = await client.post("/predict", json={"text": [sentence], "model": MODEL})
                    self._judge(sentence, reply)
                except httpx.HTTPError as error:
                    self.calls[type(error).__name__] += 1
                finally:
                    self.calls_in_flight -= 1
                await asyncio.sleep(0.1)

    def _judge(self, sentence: str, reply: httpx.Response) -> None:
        self.calls[str(reply.status_code)] += 1
        if reply.status_code == 200:
            (output,) = reply.json()["predictions"]
            if "error" in output or not self.answers.is_right(sentence, output):
                self.wrong.append(f"a call got {output}")
        elif reply.status_code not in (503, 504):
            self.wrong.append(f"a call got {reply.status_code}: {reply.text[:200]}")
        elif reply.status_code == 503 and "retry-after" not in reply.headers:
            self.wrong.append("a 503 without Retry-After")
