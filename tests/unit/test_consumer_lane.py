"""The lane's attribution of faults, with a pipeline that fails as told: what Triton cannot be made to do on demand."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from batch_consumer import suspects
from batch_consumer.lane import Lane
from batch_consumer.metrics import Metrics
from batch_consumer.model_lane import ModelLane
from batch_consumer.rows import Outcome, Row
from batch_consumer.turns import job_feeder
from serving.errors import (
    DeadlineExceeded,
    DependencyDown,
    ModelDied,
    ModelFailed,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    RowError,
    UnknownModel,
    VersionGone,
)
from serving.models import padded_length
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
    ready_versions: tuple[str, ...] = ("1",)
    equals: bool = False
    """Whether a running micro-batch delays callers, so that it has to stay short."""
    row_s: float = 0.0
    """How long the model works on one row."""
    token_s: float = 0.0
    """How long it works on one token of a row, for each that the longest has."""
    on_gpu: bool = False
    asked: list[str] = field(default_factory=list)
    """The version of each request, in order."""

    # registry
    def get(self, name: str, version: str | None = None) -> Any:
        if not self.known:
            raise UnknownModel("no such model")
        if not self.ready:
            raise ModelNotReady("not ready")
        wanted = self.ready_versions[0] if version is None else version
        if wanted not in self.ready_versions:
            raise VersionGone("gone")
        spec = SimpleNamespace(
            max_batch_rows=32, on_gpu=self.on_gpu, tokenizer_sha256=self.sha, version=wanted, bulk_instances=2,
            max_tokens=512, bulk_batch_ms=25.0, lanes_are_equals=self.equals,
        )  # fmt: skip
        return SimpleNamespace(spec=spec, tokenizer=self, canary=object())

    def versions(self, name: str) -> tuple[str, ...]:
        return self.ready_versions if self.known and self.ready else ()

    def bulk_ready(self, name: str, version: str | None = None) -> bool:
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
        self.asked.append(model.spec.version)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        longest = padded_length(model.spec, [len(text) for text in texts])
        await asyncio.sleep(0.001 + self.row_s * len(texts) + self.token_s * len(texts) * longest)
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
    monkeypatch.setattr(suspects, "DEATH_JITTER_S", 0.001)
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


@pytest.mark.parametrize(("on_gpu", "most_rows"), [(False, 8), (True, 32)])
async def test_a_micro_batch_of_long_rows_stays_within_what_the_processor_is_good_at(
    world: World, lane: Lane, on_gpu: bool, most_rows: int
) -> None:
    world.on_gpu = on_gpu
    lane.submit(rows(world, [f"{index:0128}" for index in range(64)]))
    await until(lambda: len(world.outcomes) == 64)
    assert {len(request) for request in world.requests} == {most_rows}


async def test_where_lanes_are_equals_a_micro_batch_is_as_short_as_the_model_says(world: World, lane: Lane) -> None:
    world.equals, world.row_s = True, 0.004
    lane.submit(rows(world, [f"text {i:02}" for i in range(40)]))
    await until(lambda: len(world.outcomes) == 40)
    batches = [texts for texts in world.requests if texts[0].startswith("text")]
    # 25 ms at 4 ms a row; the clock of a busy machine only makes rows look dearer.
    assert 1 <= max(map(len, batches)) <= 6
    # What the table was made from: bounded, and before the first real row.
    assert len(world.requests) - len(batches) <= 3 * 9
    assert world.requests.index(batches[0]) == len(world.requests) - len(batches)


async def test_on_a_gpu_a_micro_batch_is_as_short_as_the_model_says_with_the_padding_that_it_gets_there(
    world: World, lane: Lane
) -> None:
    world.equals, world.on_gpu, world.token_s = True, True, 0.00002
    lane.submit(rows(world, [f"{i:0130}" for i in range(40)]))
    await until(lambda: len(world.outcomes) == 40)
    batches = [texts for texts in world.requests if len(texts[0]) == 130 and texts[0].isdigit()]
    # 25 ms at 20 us a token: 9 rows of 130 tokens, but they are padded to 192.
    assert 1 <= max(map(len, batches)) <= 6


async def test_a_model_that_fails_on_made_up_rows_gets_real_ones_one_by_one(world: World, lane: Lane) -> None:
    world.equals = True
    world.fault = lambda world, texts: None if texts[0].startswith("text") else ModelFailed("no")
    lane.submit(rows(world, [f"text {i:02}" for i in range(5)]))
    await until(lambda: len(world.outcomes) == 5)
    assert not world.codes()
    assert {len(texts) for texts in world.requests if texts[0].startswith("text")} == {1}


async def test_a_version_that_is_loaded_again_with_another_config_has_its_cost_measured_again(
    world: World, lane: Lane
) -> None:
    world.equals = True

    async def measured(text: str) -> bool:
        before, done = len(world.requests), len(world.outcomes)
        lane.submit([Row(world, done, "m", text)])
        await until(lambda: len(world.outcomes) > done)
        return len(world.requests) > before + 1

    assert [await measured("a text"), await measured("b text")] == [True, False]
    world.sha = "2"
    assert [await measured("c text"), await measured("d text")] == [True, False]


@pytest.mark.parametrize("error", [DeadlineExceeded, ModelDied])
async def test_a_shape_that_ends_the_model_whenever_its_cost_is_measured_does_not_keep_rows_waiting(
    world: World, lane: Lane, error: type[Exception]
) -> None:
    world.equals = True
    world.fault = lambda _, texts: error("no") if len(texts) > 8 or len(texts[0]) > 100 else None
    lane.submit(rows(world, [f"text {i:02}" for i in range(40)]))
    await until(lambda: len(world.outcomes) == 40)
    assert not world.codes()


async def test_a_pause_ends_the_measuring_of_costs_and_a_resume_begins_it_again(world: World, lane: Lane) -> None:
    world.equals, world.row_s = True, 0.001
    lane.submit(rows(world, ["text"]))
    await until(lambda: len(world.requests) > 1)
    lane.paused = True
    await until(lambda: not world.in_flight)
    asked = len(world.requests)
    await asyncio.sleep(0.05)
    assert len(world.requests) <= asked + 1
    assert not world.outcomes
    lane.paused = False
    await until(lambda: len(world.outcomes) == 1)


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


async def test_pinned_rows_go_to_their_version_and_the_others_to_the_routed_one(world: World, lane: Lane) -> None:
    world.ready_versions = ("2", "1")
    lane.submit([*rows(world, TEXTS[:2], version="1")])
    lane.submit([Row(world, 2, "m", "row 02")])
    await until(lambda: len(world.outcomes) == 3)
    assert sorted(zip(world.asked, map(len, world.requests), strict=True)) == [("1", 2), ("2", 1)]


async def test_topic_rows_and_a_job_s_rows_of_one_version_share_its_requests(world: World, lane: Lane) -> None:
    job = job_feeder("t", 1.0, "j")
    lane.submit([*rows(world, TEXTS[:2]), Row(world, 2, "m", "row 02", feeder=job, version="1")])
    await until(lambda: len(world.outcomes) == 3)
    assert list(map(len, world.requests)) == [3]


async def test_when_a_version_goes_free_rows_take_the_routed_one_and_pinned_rows_wait_until_it_is_back(
    world: World, lane: Lane
) -> None:
    def switch(world: World, texts: list[str]) -> Exception | None:
        if world.ready_versions == ("1",):
            world.ready_versions = ("2",)
        return ModelNotReady("unloaded") if world.asked[-1] not in world.ready_versions else None

    world.fault = switch
    made = rows(world, TEXTS[:4])
    for row in made[:2]:
        row.version = "1"
    lane.submit(made)
    await until(lambda: len(world.outcomes) == 2)
    assert set(world.outcomes) == {2, 3}
    await asyncio.sleep(0.05)
    assert lane.waits_for_model()
    world.ready_versions = ("2", "1")
    await until(lambda: len(world.outcomes) == 4)
    assert world.codes() == {}


async def test_the_lane_of_a_version_that_is_gone_goes_away_once_it_is_idle(world: World, lane: Lane) -> None:
    lane.submit(rows(world, TEXTS[:2]))
    await until(lambda: len(world.outcomes) == 2)
    world.ready_versions = ("2",)
    lane.submit([Row(world, 2, "m", "row 02")])
    await until(lambda: len(world.outcomes) == 3 and [*lane._models] == [("m", "2")])


async def test_rows_with_a_pinned_version_of_an_unknown_model_are_not_condemned(world: World, lane: Lane) -> None:
    world.known = False
    lane.submit([*rows(world, TEXTS[:1], version="1"), Row(world, 1, "m", "row 01")])
    await until(lambda: len(world.outcomes) == 1)
    assert world.codes() == {1: "unknown_model"}
    world.known = True
    await until(lambda: len(world.outcomes) == 2)
    assert world.codes() == {1: "unknown_model"}


async def test_while_paused_no_request_begins_what_runs_ends_and_resume_goes_on(world: World, lane: Lane) -> None:
    lane.submit(rows(world, [f"row {index:03}" for index in range(320)]))
    await until(lambda: len(world.outcomes) > 32)
    lane.paused = True
    await until(lambda: lane.count_in_flight() == 0)
    asked, answered = len(world.requests), len(world.outcomes)
    assert 0 < answered < 320
    await asyncio.sleep(0.1)
    assert len(world.requests) == asked
    assert not lane.has_work()
    assert lane.waits_for_model()
    lane.paused = False
    await until(lambda: len(world.outcomes) == 320)
    assert not lane.waits_for_model()


async def test_a_pause_that_comes_before_a_request_has_begun_holds_it_too(
    world: World, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ModelLane._start

    def start_and_pause(model_lane: ModelLane, *given: Any) -> None:
        start(model_lane, *given)
        if not world.requests:
            lane.paused = True

    monkeypatch.setattr(ModelLane, "_start", start_and_pause)
    lane.submit(rows(world, TEXTS))
    await until(lambda: lane.paused)
    assert lane.count_in_flight() == 0
    await asyncio.sleep(0.05)
    assert world.requests == []
    monkeypatch.undo()
    lane.paused = False
    await until(lambda: len(world.outcomes) == len(TEXTS))


async def test_a_pause_also_holds_rows_that_run_alone_and_models_that_come_later(world: World, lane: Lane) -> None:
    lane.paused = True
    (row,) = rows(world, ["row 13"])
    row.is_suspect = True
    lane.submit([row])
    await asyncio.sleep(0.05)
    assert world.requests == []
    lane.paused = False
    await until(lambda: len(world.outcomes) == 1)


async def test_a_pause_while_a_dead_model_is_waited_for_reports_no_row_in_flight(world: World, lane: Lane) -> None:
    def die(world: World, texts: list[str]) -> Exception | None:
        if world.ready and len(world.requests) == 1:
            world.ready = False
            return ModelDied("died")
        return None

    world.fault = die
    lane.submit(rows(world, TEXTS[:1]))
    await until(lambda: bool(world.requests) and lane.waits_for_model())
    lane.paused = True
    await until(lambda: lane.count_in_flight() == 0)
    world.ready = True
    await asyncio.sleep(0.05)
    assert world.outcomes == {}
    lane.paused = False
    await until(lambda: len(world.outcomes) == 1)


async def test_rows_that_are_being_tokenized_when_their_version_goes_are_not_lost(world: World, lane: Lane) -> None:
    may_end = threading.Event()
    encode = world.encode

    def slowly(texts: Sequence[str], truncate: bool) -> list[Encoded | RowError]:
        may_end.wait(10)
        return encode(texts, truncate)

    world.encode = slowly  # type: ignore[method-assign]
    lane.submit(rows(world, TEXTS[:2], version="1"))
    await until(lambda: bool(lane._models) and not any(model._raw for model in lane._models.values()))
    world.ready_versions = ("2",)
    lane.submit([])
    await asyncio.sleep(0.05)
    may_end.set()
    world.ready_versions = ("2", "1")
    await until(lambda: len(world.outcomes) == 2)


@pytest.mark.parametrize("panic", [RuntimeError, type("Panic", (BaseException,), {})])
async def test_a_text_the_tokenizer_itself_fails_on_is_an_error_of_its_row_and_ends_nobody(
    world: World, lane: Lane, panic: type[BaseException]
) -> None:
    encode = world.encode

    def fail(texts: Sequence[str], truncate: bool) -> list[Encoded | RowError]:
        if "row 07" in texts:
            raise panic("index out of range")
        return encode(texts, truncate)

    world.encode = fail  # type: ignore[method-assign]
    lane.submit(rows(world, TEXTS))
    await until(lambda: len(world.outcomes) == 32)
    assert world.codes() == {7: "model_failed"}
