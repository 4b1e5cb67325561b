"""The interactive door's callers: an open loop with Poisson arrivals, and lists to compare the two doors."""

import asyncio
import random
from collections.abc import Iterator, Sequence

from twodoor.client import AsyncClient
from twodoor.demo.tally import Calls, Verdict
from twodoor.errors import TwodoorError
from twodoor.wire import Prediction

CALLS_PER_S = 8.0
MAX_IN_FLIGHT = 64
LIST_TEXTS = 64


class Callers:
    """Calls `/predict` and remembers what it said of each text."""

    def __init__(self, client: AsyncClient) -> None:
        self.said: dict[str, Verdict] = {}
        self._client = client

    async def open_loop(self, texts: Iterator[str], stop: asyncio.Event, calls: Calls, seed: int) -> None:
        """Call at random moments, ``CALLS_PER_S`` on average, until told to stop; then wait for the last answers."""
        loop = asyncio.get_running_loop()
        chance = random.Random(seed)  # noqa: S311
        room = asyncio.Semaphore(MAX_IN_FLIGHT)
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            while True:
                due += chance.expovariate(CALLS_PER_S)
                try:
                    async with asyncio.timeout_at(due):
                        await stop.wait()
                    return
                except TimeoutError:
                    # The next call is due: it does not wait for the one before, but for room.
                    await room.acquire()
                    task = group.create_task(self._one(next(texts), due, calls))
                    task.add_done_callback(lambda _: room.release())

    async def closed_loop(self, texts: Sequence[str], calls: Calls, callers: int = 4) -> None:
        """Ask for every text once, ``callers`` at a time."""
        loop = asyncio.get_running_loop()
        waiting = iter(texts)

        async def caller() -> None:
            for text in waiting:
                await self._one(text, loop.time(), calls)

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(caller())

    async def lists(self, texts: Sequence[str], callers: int = 2) -> list[str]:
        """Ask for texts in lists of neighbours in length; returns what failed."""
        ordered = sorted(texts, key=len)
        parts = iter([ordered[start : start + LIST_TEXTS] for start in range(0, len(ordered), LIST_TEXTS)])
        failures: list[str] = []

        async def caller() -> None:
            for part in parts:
                try:
                    answer = await self._client.predict_many(part, timeout_s=30.0)
                except TwodoorError as exc:
                    failures.append(f"{exc.code}: {exc}")
                    continue
                for text, row in zip(part, answer.rows, strict=True):
                    if isinstance(row, Prediction):
                        self._remember(text, row)

        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(caller())
        return failures

    async def _one(self, text: str, due: float, calls: Calls) -> None:
        try:
            self._remember(text, await self._client.predict(text))
        except TwodoorError as exc:
            calls.failures.append(f"{exc.code}: {exc}")
            return
        calls.latencies_ms.append((asyncio.get_running_loop().time() - due) * 1000)

    def _remember(self, text: str, row: Prediction) -> None:
        if row.label is not None and row.score is not None:
            self.said[text] = Verdict(row.label, row.score)
