"""Each duty fails on its own, what is away is told once, and the stop is obeyed."""

import asyncio
from collections.abc import Callable

import structlog
from structlog.testing import capture_logs

from batch_consumer.duties import Duty, Rounds
from serving.errors import DependencyDown


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


class Work:
    """A duty's work that fails as long as ``error`` is set, and has ``more`` pages to do."""

    def __init__(self, more: int = 0) -> None:
        self.error: Exception | None = None
        self.pages = self.tries = 0
        self.more = more

    async def __call__(self) -> bool:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.pages += 1
        self.more -= 1
        return self.more >= 0


async def test_a_duty_that_fails_stops_no_other_and_is_tried_again() -> None:
    structlog.reset_defaults()
    broken, away, fine = Work(), Work(), Work()
    broken.error, away.error = ValueError("a bug"), DependencyDown("the ledger does not answer")
    stop = asyncio.Event()
    works = {"broken": broken, "away": away, "fine": fine}
    rounds = Rounds("test", [Duty(name, work, 0.01, 0.02) for name, work in works.items()])
    with capture_logs() as logs:
        task = asyncio.create_task(rounds.run(stop))
        await _until(lambda: fine.pages > 5 and broken.tries > 3 and away.tries > 3)
        broken.error = away.error = None
        await _until(lambda: broken.pages > 1 and away.pages > 1)
        stop.set()
        rounds.wake()
        await asyncio.wait_for(task, 1)
    assert [entry["event"] for entry in logs] == ["a duty failed", "duties wait", "duties go on"]


async def test_a_duty_with_much_to_do_goes_on_at_once_but_lets_its_neighbours_have_their_turn() -> None:
    much, neighbour = Work(more=90), Work()
    stop = asyncio.Event()
    rounds = Rounds("test", [Duty("much", much, 60, 1), Duty("neighbour", neighbour, 0.0, 1)])
    task = asyncio.create_task(rounds.run(stop))
    await _until(lambda: much.pages == 91)
    assert neighbour.pages >= 4
    stop.set()
    rounds.wake()
    await asyncio.wait_for(task, 1)


async def test_a_duty_that_is_hastened_does_not_wait_for_its_time() -> None:
    work, stop = Work(), asyncio.Event()
    rounds = Rounds("test", [Duty("close", work, 60, 1)])
    task = asyncio.create_task(rounds.run(stop))
    await _until(lambda: work.pages == 1)
    rounds.hasten("close")
    await _until(lambda: work.pages == 2)
    stop.set()
    rounds.wake()
    await asyncio.wait_for(task, 1)
