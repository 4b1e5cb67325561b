"""The lane's attribution of faults, with a pipeline that fails as told: what Triton cannot be made to do on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from batch_consumer import model_lane
from batch_consumer.lane import Lane
from batch_consumer.metrics import Metrics
from batch_consumer.rows import Outcome, Row
from serving.errors import (
    DependencyDown,
    ModelDied,
    ModelFailed,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    RowError,
    UnknownModel,
)
from serving.postprocess import Classification
from serving.preprocess import Encoded
from serving.settings import ConsumerSettings

ANSWER = Classification("positive", 0.9, {"positive": 0.9}, False)
Fault = Callable[["World", list[str]], Exception | None]


@dataclass
class World:
    """Registry, pipeline and owner of the rows in one: a model that fails as ``fault`` says."""

    fault: Fault = lambda world, texts: None
    canary: bool = True
    ready: bool = True
    known: bool = True
    alive: bool = True
    requests: list[list[str]] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    suspects: dict[int, int] = field(default_factory=dict)
    in_flight: int = 0
    most_in_flight: int = 0
    names: frozenset[str] = frozenset({"m"})
    texts: dict[int, str] = field(default_factory=dict)
    sha: str = "1"

    # registry
    def get(self, name: str) -> Any:
        if not self.known:
            raise UnknownModel("no such model")
        if not self.ready:
            raise ModelNotReady("not ready")
        spec = SimpleNamespace(max_batch_rows=32, on_gpu=False, tokenizer_sha256=self.sha)
        return SimpleNamespace(spec=spec, tokenizer=self, canary=object())

    def bulk_ready(self, name: str) -> bool:
        return self.ready

    # tokenizer
    def encode(self, texts: Sequence[str], truncate: bool) -> list[Encoded | RowError]:
        encoded: list[Encoded | RowError] = []
        for text in texts:
            ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
            encoded.append(Encoded(ids))
        return encoded

    # pipeline
    async def infer(self, model: Any, rows: Sequence[Encoded], *_: Any, **__: Any) -> list[Outcome]:
        texts = [bytes(row.ids.astype(np.uint8)).decode() for row in rows]
        self.requests.append(texts)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        error = self.fault(self, texts)
        if error is not None:
            raise error
        return [ANSWER] * len(rows)

    async def canary_passes(self, *_: Any) -> bool:
        return self.canary

    # owner
    def finish(self, index: int, outcome: Outcome) -> None:
        assert index not in self.outcomes, "a second outcome"
        self.outcomes[index] = outcome

    def suspect(self, index: int, deaths: int | None) -> None:
        if deaths is None:
            self.suspects.pop(index, None)
        else:
            self.suspects[index] = deaths

    def codes(self) -> dict[int, str]:
        return {index: o.code for index, o in self.outcomes.items() if isinstance(o, RowError)}


@pytest.fixture
def world() -> World:
    return World()


@pytest_asyncio.fixture
async def lane(world: World, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lane]:
    monkeypatch.setattr(model_lane, "DEATH_JITTER_S", 0.001)
    settings = ConsumerSettings(retry_backoff_max_s=0.01)  # type: ignore[call-arg]
    fake: Any = world
    made = Lane(fake, fake, settings, Metrics())
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.wait([task])


def rows(world: World, texts: Sequence[str], **more: Any) -> list[Row]:
    return [Row(world, index, "m", text, **more) for index, text in enumerate(texts)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


TEXTS = [f"row {index:02}" for index in range(32)]


async def test_rows_go_in_full_batches_with_a_bounded_number_in_flight(world: World, lane: Lane) -> None:
    lane.submit(rows(world, [f"row {index:03}" for index in range(320)]))
    await until(lambda: len(world.outcomes) == 320)
    assert {len(request) for request in world.requests} == {32}
    assert world.most_in_flight == 3


async def test_an_input_that_is_refused_is_found_by_splitting_and_its_neighbours_are_answered(
    world: World, lane: Lane
) -> None:
    world.fault = lambda _, texts: ModelRefused("refused") if "row 13" in texts else None
    lane.submit(rows(world, TEXTS))
    await until(lambda: len(world.outcomes) == 32)
    assert world.codes() == {13: "model_failed"}
    assert len(world.requests) <= 12


async def test_a_row_that_fails_alone_while_the_canary_passes_is_condemned_and_no_other(
    world: World, lane: Lane
) -> None:
    world.fault = lambda _, texts: ModelFailed("failed") if "row 13" in texts else None
    lane.submit(rows(world, TEXTS))
    await until(lambda: len(world.outcomes) == 32)
    assert world.codes() == {13: "model_failed"}
    assert world.suspects == {}


async def test_while_the_canary_fails_no_row_is_condemned_and_all_are_answered_later(world: World, lane: Lane) -> None:
    world.canary = False
    world.fault = lambda world, _: None if world.canary else ModelFailed("everything fails")
    lane.submit(rows(world, TEXTS[:4]))
    await until(lane.waits_for_model)
    await asyncio.sleep(0.05)
    assert world.outcomes == {}
    assert lane.waits_for_model()
    assert not lane.has_work()
    world.canary = True
    await until(lambda: len(world.outcomes) == 4)
    assert world.codes() == {}


async def test_a_row_under_which_the_model_dies_is_condemned_at_the_third_death_alone_and_its_neighbours_are_not(
    world: World, lane: Lane
) -> None:
    deaths: list[int] = []

    def die(world: World, texts: list[str]) -> Exception | None:
        if "row 13" not in texts:
            return None
        deaths.append(len(texts))
        return ModelDied("died")

    world.fault = die
    lane.submit(rows(world, TEXTS))
    await until(lambda: len(world.outcomes) == 32)
    assert world.codes() == {13: "row_crashed"}
    assert deaths == [32, 1, 1, 1]
    assert world.suspects == {}


async def test_deaths_remembered_from_before_count(world: World, lane: Lane) -> None:
    world.fault = lambda _, texts: ModelDied("died")
    (row,) = rows(world, ["row 13"])
    row.is_suspect, row.deaths = True, 2
    lane.submit([row])
    await until(lambda: len(world.outcomes) == 1)
    assert world.codes() == {0: "row_crashed"}
    assert len(world.requests) == 1


async def test_a_server_that_goes_away_again_and_again_under_many_rows_condemns_none(world: World, lane: Lane) -> None:
    left = [4]

    def restart(world: World, texts: list[str]) -> Exception | None:
        if len(texts) > 1 and left[0]:
            left[0] -= 1
            return DependencyDown("away")
        return None

    world.fault = restart
    lane.submit(rows(world, [f"row {index:03}" for index in range(160)]))
    await until(lambda: len(world.outcomes) == 160)
    assert world.codes() == {}
    assert world.suspects == {}


async def test_a_full_queue_only_slows_down(world: World, lane: Lane) -> None:
    left = [5]

    def refuse(world: World, texts: list[str]) -> Exception | None:
        left[0] -= 1
        return Overloaded("full") if left[0] >= 0 else None

    world.fault = refuse
    lane.submit(rows(world, TEXTS))
    await until(lambda: len(world.outcomes) == 32)
    assert world.codes() == {}
    assert all(len(request) == 32 for request in world.requests)


async def test_rows_of_a_model_that_is_away_wait_and_those_of_an_unknown_one_get_their_error(
    world: World, lane: Lane
) -> None:
    world.ready = False
    lane.submit(rows(world, TEXTS[:3]))
    await asyncio.sleep(0.05)
    assert world.outcomes == {}
    assert lane.waiting()["m"][0] == 3
    world.known = False
    await until(lambda: len(world.outcomes) == 3)
    assert set(world.codes().values()) == {"unknown_model"}


async def test_rows_nobody_waits_for_any_more_cost_the_model_nothing(world: World, lane: Lane) -> None:
    world.ready = False
    lane.submit(rows(world, TEXTS))
    world.alive = False
    world.ready = True
    lane.drop_dead()
    await asyncio.sleep(0.05)
    assert world.requests == []
    assert not lane.has_work()


async def test_rows_tokenized_for_an_older_version_are_tokenized_again(world: World, lane: Lane) -> None:
    seen: list[str] = []

    def change(world: World, texts: list[str]) -> Exception | None:
        seen.append(world.sha)
        if world.sha == "1":
            world.sha = "2"
            return ModelNotReady("switching")
        return None

    world.fault = change
    made = rows(world, TEXTS[:2])
    lane.submit(made)
    await until(lambda: len(world.outcomes) == 2)
    assert {row.tokenizer for row in made} == {"2"}


async def test_a_queue_too_short_for_all_canaries_at_once_keeps_nobody_waiting(world: World, lane: Lane) -> None:
    busy = [0]

    async def canary_passes(*_: Any) -> bool:
        # One instance with a queue of one: a third request is refused.
        if busy[0] >= 2:
            raise Overloaded("full")
        busy[0] += 1
        await asyncio.sleep(0.001)
        busy[0] -= 1
        return True

    world.canary_passes = canary_passes  # type: ignore[method-assign]
    failed: list[list[str]] = []

    def refuse(world: World, texts: list[str]) -> Exception | None:
        failed.append(texts)
        return Overloaded("full") if len(failed) == 1 else None

    world.fault = refuse
    lane.submit(rows(world, TEXTS))
    await until(lambda: len(world.outcomes) == 32)
    assert world.codes() == {}


async def test_a_row_under_which_a_model_died_that_is_then_deleted_gets_its_error(world: World, lane: Lane) -> None:
    def die(world: World, texts: list[str]) -> Exception | None:
        world.ready = False
        return ModelDied("died")

    world.fault = die
    (row,) = rows(world, ["row 13"])
    row.is_suspect = True
    lane.submit([row])
    await until(lambda: bool(world.requests) and lane.waits_for_model())
    world.known = False
    await until(lambda: len(world.outcomes) == 1)
    assert world.codes() == {0: "unknown_model"}
