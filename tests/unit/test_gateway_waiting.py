"""Who waits for a job's end is bounded in number, asks at a modest pace, and holds no stop up."""

import asyncio
import time
from datetime import UTC, datetime

from gateway.waiting import Waiters
from jobs.records import Job
from jobs.states import Status


class Asked:
    """A job that is asked for."""

    def __init__(self) -> None:
        self.times, self.status = 0, Status.RUNNING

    async def get(self) -> Job:
        self.times += 1
        moment = datetime(2026, 1, 5, tzinfo=UTC)
        return Job("job_1", "a", self.status, "m", "1", False, {}, 2, 1, 0, moment, moment, None, moment, None)


async def test_a_wait_asks_seldom_and_ends_with_its_time() -> None:
    asked, started_s = Asked(), time.monotonic()
    job = await Waiters().until_ended(asked.get, 0.6)
    assert job.status is Status.RUNNING
    assert time.monotonic() - started_s >= 0.6
    assert 2 <= asked.times <= 6


async def test_one_too_many_is_not_to_wait_until_another_has_ended() -> None:
    waiters, asked = Waiters(most=2), Asked()
    waiting = [asyncio.create_task(waiters.until_ended(asked.get, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    assert waiters.full
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert not waiters.full
    asked.status = Status.COMPLETED
    assert (await asyncio.wait_for(waiting[1], 5)).status is Status.COMPLETED


async def test_a_stop_ends_every_wait_with_the_job_as_it_is() -> None:
    waiters, asked = Waiters(), Asked()
    waiting = [asyncio.create_task(waiters.until_ended(asked.get, 600)) for _ in range(3)]
    await asyncio.sleep(0.05)
    waiters.stop()
    jobs = await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert {job.status for job in jobs} == {Status.RUNNING}
