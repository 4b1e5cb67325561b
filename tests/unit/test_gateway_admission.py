"""The bounds of the interactive door: tokens, drain rate, places at Triton, bytes."""

import asyncio
import time

import pytest

from gateway.admission import Admission, ByteBudget, DrainRate, Slots
from gateway.metrics import Metrics
from serving.deadline import Deadline
from serving.errors import DeadlineExceeded, Overloaded


def test_tokens_are_given_back_when_the_last_holder_is_done() -> None:
    admission = Admission(1000, Metrics())
    lease = admission.admit(600)
    lease.shrink(100)
    assert admission.tokens == 100
    lease.hold()
    lease.drop()
    assert admission.tokens == 100
    lease.drop()
    assert admission.tokens == 0


def test_shrinking_never_grows_a_lease() -> None:
    admission = Admission(1000, Metrics())
    lease = admission.admit(100)
    lease.shrink(300)
    assert admission.tokens == 100


def test_over_the_bound_a_call_is_refused_and_nothing_is_reserved() -> None:
    admission = Admission(1000, Metrics())
    admission.admit(900)
    with pytest.raises(Overloaded):
        admission.admit(101)
    assert admission.tokens == 900
    admission.admit(100)
    assert admission.tokens == 1000


def test_a_call_larger_than_the_bound_is_taken_by_an_idle_door_alone() -> None:
    admission = Admission(1000, Metrics())
    lease = admission.admit(5000)
    assert admission.tokens == 1000
    with pytest.raises(Overloaded):
        admission.admit(1)
    lease.drop()
    admission.admit(1).drop()


def test_the_drain_rate_is_what_was_answered_over_the_window() -> None:
    rate = DrainRate(window_s=10)
    assert rate.tokens_per_s(100.0) is None
    for second in range(5):
        rate.add(200, 100.0 + second)
    assert rate.tokens_per_s(105.0) == pytest.approx(200)
    assert rate.tokens_per_s(112.5) == pytest.approx(400 / 9.5)
    assert rate.tokens_per_s(130.0) is None


def test_each_refused_call_is_told_to_come_after_those_refused_before_it() -> None:
    admission = Admission(1000, Metrics())
    admission.admit(500).drop()  # 500 tokens in the last second
    admission.admit(1000)
    told = []
    for _ in range(4):
        with pytest.raises(Overloaded) as refused:
            admission.admit(1000)
        told.append(refused.value.retry_after_s)
    assert told == sorted(told)
    assert told[0] == pytest.approx(2, abs=0.2)
    assert told[1] == pytest.approx(4, abs=0.2)
    for _ in range(100):
        with pytest.raises(Overloaded) as refused:
            admission.admit(1000)
    assert refused.value.retry_after_s <= 30


def test_without_a_measured_rate_a_caller_is_told_a_second() -> None:
    admission = Admission(10, Metrics())
    admission.admit(10)
    with pytest.raises(Overloaded) as refused:
        admission.admit(1)
    assert refused.value.retry_after_s == 1


async def test_waiting_for_a_place_ends_with_the_deadline() -> None:
    admission, slots = Admission(1000, Metrics()), Slots(1)
    lease = admission.admit(10)
    slot = await slots.take(Deadline.after_ms(1000), lease)
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await slots.take(Deadline.after_ms(50), lease)
    assert time.monotonic() - started_s < 0.5
    slot.release()
    (await slots.take(Deadline.after_ms(1000), lease)).release()
    lease.drop()
    assert admission.tokens == 0


async def test_a_waiter_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    admission, slots = Admission(1000, Metrics()), Slots(1)
    lease = admission.admit(10)
    slot = await slots.take(Deadline.after_ms(1000), lease)
    waiter = asyncio.create_task(slots.take(Deadline.after_ms(10_000), lease))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    slot.release()
    (await slots.take(Deadline.after_ms(1000), lease)).release()


def test_bytes_over_the_budget_are_refused_and_not_counted() -> None:
    budget = ByteBudget(100, Metrics())
    budget.take(80)
    with pytest.raises(Overloaded):
        budget.take(21)
    assert budget.held == 80
    budget.give_back(80)
    budget.take(100)
