"""What `/readyz` tells of the stores of jobs."""

import asyncio

import pytest

from gateway import job_door
from gateway.job_door import Stores, following
from jobs.memory import MemoryLedger
from jobs.objects import Objects, memory_objects
from serving.errors import DependencyDown


class Ledger(MemoryLedger):
    """Answers until it is told not to."""

    away = False

    async def ping(self) -> None:
        if self.away:
            raise DependencyDown("away")


async def test_an_object_store_that_hangs_does_not_hold_up_the_word_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hanging(Objects):
        """Does not answer; its deadline is far away."""

        async def ping(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(job_door, "_CHECK_INTERVAL_S", 0.01)
    ledger = Ledger()
    async with following(Stores(ledger, Hanging(memory_objects()._store, 30))) as health, asyncio.timeout(5):
        while not health.up["postgres"]:
            await asyncio.sleep(0.01)
        ledger.away = True
        while health.up["postgres"]:
            await asyncio.sleep(0.01)
        assert not health.up["objects"]
