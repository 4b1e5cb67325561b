"""How rows of concurrent calls are joined: which go together, whose turn it is, and what late, left and failed ones cost."""

import asyncio
import contextvars
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import Admission, Lease
from gateway.join import Joiner, Outcome
from gateway.join_plan import JoinBounds, neighbours
from gateway.metrics import Metrics
from serving.deadline import Deadline
from serving.errors import DeadlineExceeded, DependencyDown, ModelFailed, ModelRefused, Overloaded, RowError
from serving.models import ModelSpec, parse_spec
from serving.pipeline import Pipeline
from serving.postprocess import Answer, Embedding
from serving.preprocess import Encoded
from serving.registry import Model
from serving.settings import GatewaySettings
from tests.unit.test_serving_models import LABELS, config

BAD = 666
SOON_S = 5.0


def a_row(tokens: int, mark: int = 1) -> Encoded:
    return Encoded(np.full(tokens, mark, dtype=np.int64))


class FakePipeline:
    """A model server whose requests end when the test says so; a request with a ``BAD`` row fails."""

    def __init__(self) -> None:
        self.sent: list[list[Encoded]] = []
        self.deadlines: list[Deadline] = []
        self.may_end = asyncio.Semaphore(0)
        self.cancelled = 0
        self.at_once = 0
        self.error: Exception | None = None
        self.canary = True

    async def infer(
        self,
        model: Model,
        rows: Sequence[Encoded],
        lane: str,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> list[Answer | RowError]:
        self.sent.append(list(rows))
        self.deadlines.append(deadline)
        self.at_once += 1
        try:
            await self.may_end.acquire()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1
            if ended is not None:
                ended()
        if self.error is not None:
            raise self.error
        if any(BAD in row.ids for row in rows):
            raise ModelFailed("the model failed on this input")
        return [Embedding(row.ids.astype(np.float32)) for row in rows]

    async def canary_passes(self, *_: object) -> bool:
        return self.canary

    def let(self, requests: int) -> None:
        """Let so many requests end."""
        for _ in range(requests):
            self.may_end.release()

    @property
    def lengths(self) -> list[list[int]]:
        return [[row.tokens for row in rows] for rows in self.sent]


class House:
    """A joiner over the fake server, and calls that go into it."""

    def __init__(self, **settings: Any) -> None:
        self.server = FakePipeline()
        self.admission = Admission(1_000_000, Metrics(), max_rows=100_000)
        model = Model(spec_of(), cast("Any", None), None)
        self.joiner = Joiner(cast("Pipeline", self.server), model, GatewaySettings(**settings))
        self.leases: list[Lease] = []

    def call(self, *rows: Encoded | RowError, within_s: float = 60.0) -> "asyncio.Task[list[Outcome]]":
        return asyncio.create_task(self._call(rows, Deadline.after_ms(within_s * 1000)))

    async def _call(self, rows: Sequence[Encoded | RowError], deadline: Deadline) -> list[Outcome]:
        lease = self.admission.admit(len(rows), len(rows))
        try:
            return await self.joiner.run(rows, deadline, lease)
        finally:
            lease.drop()

    async def until(self, requests: int) -> None:
        """Wait until so many requests were sent."""
        async with asyncio.timeout(SOON_S):
            while len(self.server.sent) < requests:
                await asyncio.sleep(0)
        await turns()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """One request at a time, of at most four rows. Afterwards nothing is held or waits."""
    made = House(max_in_flight=1, max_request_rows=4)
    yield made
    made.server.let(1_000)
    async with asyncio.timeout(SOON_S):
        while made.joiner.busy:
            await asyncio.sleep(0)
    await turns()
    assert made.admission.tokens == 0
    await made.joiner.close()


async def turns(count: int = 20) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


def spec_of(**changes: object) -> ModelSpec:
    return parse_spec(config(**changes), "1", LABELS)


def values(outcome: Outcome) -> list[float]:
    assert isinstance(outcome, Embedding), outcome
    return [float(value) for value in outcome.values]


# --- which rows go together


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=32),
    rows=st.integers(1, 16),
    tokens=st.integers(16, 4096),
)
def test_the_first_row_always_goes_and_the_bounds_hold(lengths: list[int], rows: int, tokens: int) -> None:
    chosen = neighbours(spec_of(), lengths, JoinBounds(rows, tokens, 20))
    assert 0 in chosen
    assert len(set(chosen)) == len(chosen) <= rows
    assert len(chosen) == 1 or len(chosen) * max(lengths[place] for place in chosen) <= tokens


def test_neighbours_in_length_go_together_and_strangers_do_not() -> None:
    lengths = [20, 200, 21, 19, 8, 20, 60]
    assert sorted(neighbours(spec_of(), lengths, JoinBounds(8, 4096, 20))) == [0, 2, 3, 5]


def test_the_more_a_request_costs_besides_its_rows_the_more_unlike_they_may_be() -> None:
    lengths = [20, 12, 28]
    assert neighbours(spec_of(), lengths, JoinBounds(8, 4096, 0)) != [1, 0, 2]
    assert sorted(neighbours(spec_of(), lengths, JoinBounds(8, 4096, 1_000))) == [0, 1, 2]


# --- turns


async def test_a_lone_call_goes_out_at_once(house: House) -> None:
    call = house.call(a_row(5, 7))
    await house.until(1)
    house.server.let(1)
    (outcome,) = await call
    assert values(outcome) == [7.0] * 5


async def test_rows_that_wait_go_out_together_when_a_request_comes_back(house: House) -> None:
    first = house.call(a_row(50))
    await house.until(1)
    others = [house.call(a_row(20, mark)) for mark in range(4)]
    await turns()
    assert len(house.server.sent) == 1
    house.server.let(2)
    answers = await asyncio.gather(*others)
    assert house.server.lengths == [[50], [20] * 4]
    assert [values(outcome)[0] for (outcome,) in answers] == [0, 1, 2, 3]
    await first


async def test_the_row_that_waits_longest_is_in_the_next_request_whatever_its_length(house: House) -> None:
    house.call(a_row(50))
    await house.until(1)
    odd = house.call(a_row(400))
    await turns()
    for _ in range(12):
        house.call(a_row(20))
    house.server.let(1)
    await house.until(2)
    assert house.server.lengths[1] == [400]
    house.server.let(1)
    await odd


async def test_a_long_list_lets_single_calls_have_their_turns(house: House) -> None:
    giant = house.call(*(a_row(20) for _ in range(200)))
    await house.until(1)
    singles = [house.call(a_row(tokens)) for tokens in (40, 80, 160)]
    await turns()
    house.server.let(8)
    await asyncio.gather(*singles)
    assert not giant.done()
    house.server.let(200)
    assert len(await giant) == 200


async def test_no_more_requests_are_at_the_model_than_the_bound() -> None:
    house = House(max_in_flight=3, max_request_rows=2)
    calls = [house.call(a_row(20)) for _ in range(40)]
    for done in range(12):
        await house.until(3 + done)
        assert house.server.at_once == 3
        house.server.let(1)
    house.server.let(1_000)
    await asyncio.gather(*calls)


def test_without_a_setting_one_request_more_than_there_are_instances_is_at_the_model() -> None:
    assert spec_of(instance_group=[{"count": 2, "kind": "KIND_CPU"}, {"kind": "KIND_CPU"}]).instances == 3
    assert spec_of(instance_group=[]).instances == 1


async def test_errors_of_rows_keep_their_places_and_are_never_sent(house: House) -> None:
    call = house.call(RowError("a"), a_row(5, 3), RowError("b"))
    house.server.let(1)
    first, middle, last = await call
    assert [str(first), str(last)] == ["a", "b"]
    assert values(middle) == [3.0] * 5
    assert await house.call(RowError("c")) != []
    assert len(house.server.sent) == 1


# --- late and left


async def test_a_call_past_its_deadline_is_never_sent(house: House) -> None:
    house.call(a_row(50))
    await house.until(1)
    late, other = house.call(a_row(20), within_s=0.02), house.call(a_row(20, 9))
    with pytest.raises(DeadlineExceeded):
        await late
    house.server.let(2)
    await other
    assert [row.ids[0] for row in house.server.sent[1]] == [9]


async def test_when_many_are_late_at_once_those_behind_them_still_get_their_turn(house: House) -> None:
    house.call(a_row(50))
    await house.until(1)
    late = [house.call(a_row(20), within_s=0.02) for _ in range(100)]
    other = house.call(a_row(20, 9))
    await turns()
    await asyncio.to_thread(asyncio.run, asyncio.sleep(0.05))
    house.server.let(2)
    await other
    ended = await asyncio.gather(*late, return_exceptions=True)
    assert {type(one) for one in ended} == {DeadlineExceeded}
    assert house.server.lengths == [[50], [20]]


async def test_a_joined_request_has_until_the_latest_of_its_deadlines(house: House) -> None:
    house.call(a_row(50))
    await house.until(1)
    calls = [house.call(a_row(20), within_s=seconds) for seconds in (5, 50, 20)]
    house.server.let(2)
    await asyncio.gather(*calls)
    assert 40 < house.server.deadlines[1].remaining_s() <= 50


async def test_a_caller_who_leaves_the_line_is_never_sent(house: House) -> None:
    house.call(a_row(50))
    await house.until(1)
    gone, stays = house.call(a_row(20, 1), a_row(20, 1)), house.call(a_row(20, 2))
    await turns()
    gone.cancel()
    house.server.let(2)
    await stays
    assert [row.ids[0] for row in house.server.sent[1]] == [2]


async def test_one_who_leaves_a_joined_request_takes_nothing_from_the_others(house: House) -> None:
    house.call(a_row(50))
    await house.until(1)
    gone, stays = house.call(a_row(20, 1)), house.call(a_row(20, 2))
    await turns()
    house.server.let(1)
    await house.until(2)
    gone.cancel()
    await turns()
    assert house.server.cancelled == 0
    house.server.let(1)
    assert values((await stays)[0])[0] == 2
    assert len(house.server.sent) == 2


async def test_a_request_nobody_waits_for_any_more_is_ended_and_its_place_is_free_when_the_server_is_done(
    house: House,
) -> None:
    calls = [house.call(a_row(20)), house.call(a_row(30))]
    await house.until(1)
    calls[0].cancel()
    await house.until(2)
    assert house.server.cancelled == 1
    house.server.let(1)
    await calls[1]


# --- failures


async def test_a_row_the_model_fails_on_fails_alone_and_its_neighbours_of_other_calls_are_answered(
    house: House,
) -> None:
    house.call(a_row(50))
    await house.until(1)
    good, bad, other = house.call(a_row(20, 1)), house.call(a_row(20, BAD), a_row(20, 3)), house.call(a_row(20, 4))
    await turns()
    house.server.let(20)
    assert values((await good)[0])[0] == 1
    failed, fine = await bad
    assert isinstance(failed, ModelFailed)
    assert values(fine)[0] == 3
    assert values((await other)[0])[0] == 4
    assert house.server.lengths[1:] == [[20] * 4, [20], [20], [20], [20]]


async def test_a_row_is_not_blamed_while_the_model_fails_on_its_known_row_too(house: House) -> None:
    house.server.canary = False
    house.server.let(1)
    with pytest.raises(DependencyDown):
        await house.call(a_row(20, BAD))


async def test_a_refused_row_is_blamed_without_asking_the_canary(house: House) -> None:
    house.server.canary = False
    house.server.error = ModelRefused("the model refused this input")
    house.server.let(1)
    (outcome,) = await house.call(a_row(20))
    assert isinstance(outcome, ModelRefused)


@pytest.mark.parametrize("error", [Overloaded("full", 7.0), DependencyDown("away"), ValueError("a bug")])
async def test_what_ends_a_joined_request_is_told_to_each_of_its_calls_and_the_next_one_is_served(
    house: House, error: Exception
) -> None:
    house.call(a_row(50))
    await house.until(1)
    calls = [house.call(a_row(20)) for _ in range(3)]
    await turns()
    house.server.let(1)
    await house.until(2)
    house.server.error = error
    house.server.let(1)
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(one) for one in ended} == {type(error)}
    if isinstance(error, Overloaded):
        assert {cast("Overloaded", one).retry_after_s for one in ended} == {7.0}
    house.server.error = None
    house.server.let(1)
    await house.call(a_row(20))


async def test_a_stop_ends_every_call_on_its_way(house: House) -> None:
    call = house.call(a_row(20))
    await house.until(1)
    await house.joiner.close()
    with pytest.raises(DependencyDown):
        await call


async def test_a_stop_ends_also_what_waits_or_has_just_set_out_and_nothing_more_is_sent(house: House) -> None:
    calls = [house.call(a_row(20)), house.call(a_row(200))]
    await asyncio.sleep(0)  # both are in line; the first one's request has not begun
    await house.joiner.close()
    async with asyncio.timeout(SOON_S):
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(one) for one in ended} == {DependencyDown}
    assert house.server.sent == []


async def test_requests_of_one_call_that_run_side_by_side_do_not_share_a_context() -> None:
    house = House(max_in_flight=2, max_request_rows=1)
    seen: list[str] = []
    variable = contextvars.ContextVar("variable", default="the call's")
    original = house.server.infer

    async def infer(*args: Any, **kwargs: Any) -> list[Answer | RowError]:
        seen.append(variable.get())
        variable.set("another request's")
        return await original(*args, **kwargs)

    house.server.infer = infer  # type: ignore[method-assign]
    house.server.let(2)
    await house.call(a_row(20), a_row(20))
    assert seen == ["the call's"] * 2


@pytest.mark.parametrize("lengths", [(20,), (8, 12, 20, 24, 30, 40)], ids=["all alike", "unlike"])
async def test_a_list_beside_many_single_calls_gets_a_request_of_its_own_each_time_it_is_its_turn(
    lengths: tuple[int, ...],
) -> None:
    house = House(max_in_flight=1, max_request_rows=8)
    singles = 0
    some = itertools.cycle(lengths)

    async def single() -> None:
        nonlocal singles
        while True:
            await house.call(a_row(next(some)))
            singles += 1

    crowd = [asyncio.create_task(single()) for _ in range(64)]
    await house.until(1)
    listed = house.call(*(a_row(next(some)) for _ in range(64)))
    while not listed.done():
        house.server.let(1)
        await turns(5)
    # Eight turns, and between two of them each of the others has one.
    assert singles < 2 * 8 * 64
    for task in crowd:
        task.cancel()
    house.server.let(1_000)
    await asyncio.gather(*crowd, return_exceptions=True)
    await house.joiner.close()
