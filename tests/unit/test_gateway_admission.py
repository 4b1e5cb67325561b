"""The bounds of the interactive door: rows, tokens, deadlines, bytes."""

import contextlib
from collections import Counter

import pytest

from gateway.admission import BUSY_ROWS, Admission, ByteBudget, Lease
from gateway.metrics import Metrics
from serving.deadline import Deadline
from serving.errors import Overloaded


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def door(*, rows: int = 100, tokens: int = 1_000, clock: Clock | None = None) -> Admission:
    return Admission(tokens, Metrics(), max_rows=rows, clock=clock or Clock())


def refused(admission: Admission, tokens: int = 1, rows: int = 1, deadline: Deadline | None = None) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        admission.admit(tokens, rows, deadline)
    return caught.value


def served_at(admission: Admission, clock: Clock, rows_per_s: int, held: int, seconds: int = 3) -> list[Lease]:
    """Let the door answer so many rows a second while ``held`` rows stay in line; returns those in line."""
    line = [admission.admit(1) for _ in range(held)]
    for _ in range(rows_per_s * seconds):
        clock.now_s += 1 / rows_per_s
        line.pop(0).drop()
        line.append(admission.admit(1))
    return line


def test_tokens_are_given_back_when_the_last_holder_is_done() -> None:
    admission = door()
    lease = admission.admit(600, 3)
    lease.shrink(100)
    assert (admission.rows, admission.tokens) == (3, 100)
    lease.hold()
    lease.drop()
    assert (admission.rows, admission.tokens) == (3, 100)
    lease.drop()
    assert (admission.rows, admission.tokens) == (0, 0)


def test_shrinking_never_grows_a_lease() -> None:
    admission = door()
    lease = admission.admit(100)
    lease.shrink(300)
    assert admission.tokens == 100


def test_over_the_bound_of_tokens_a_call_is_refused_and_nothing_is_reserved() -> None:
    admission = door()
    admission.admit(900)
    refused(admission, 101)
    assert (admission.rows, admission.tokens) == (1, 900)


def test_over_the_bound_of_rows_a_call_is_refused_and_nothing_is_reserved() -> None:
    admission = door(rows=10)
    admission.admit(8, 8)
    refused(admission, 3, 3)
    assert (admission.rows, admission.tokens) == (8, 8)
    admission.admit(2, 2)
    assert admission.rows == 10


def test_a_call_larger_than_a_bound_is_taken_by_an_idle_door_alone() -> None:
    for tokens, rows in ((5_000, 1), (1, 500)):
        admission = door()
        lease = admission.admit(tokens, rows)
        refused(admission)
        lease.drop()
        admission.admit(1).drop()


def test_room_that_was_promised_is_not_given_to_those_who_come_before() -> None:
    clock = Clock()
    admission = door(rows=40, clock=clock)
    line = served_at(admission, clock, rows_per_s=20, held=40)
    told = [refused(admission).retry_after_s for _ in range(32)]
    assert told[0] == 1
    for lease in line[:10]:
        lease.drop()
    clock.now_s += 0.5
    taken = 0
    with contextlib.suppress(Overloaded):
        while admission.admit(1):
            taken += 1
    assert taken < 10
    for lease in line[10:20]:
        lease.drop()
    clock.now_s += 0.5
    for _ in range(told.count(1)):
        admission.admit(1)


def test_promised_room_that_nobody_takes_is_free_again() -> None:
    clock = Clock()
    admission = door(rows=40, clock=clock)
    line = served_at(admission, clock, rows_per_s=20, held=40)
    while refused(admission).retry_after_s < 60:
        pass
    for lease in line:
        lease.drop()
    clock.now_s += 63
    for _ in range(40):
        admission.admit(1)


def test_each_second_gets_as_many_as_there_will_be_room_for() -> None:
    clock = Clock()
    admission = door(rows=400, clock=clock)
    served_at(admission, clock, rows_per_s=100, held=400)
    told = Counter(refused(admission).retry_after_s for _ in range(600))
    assert set(told) == set(range(1, len(told) + 1))
    assert all(70 <= told[second] <= 100 for second in range(2, len(told)))


def test_without_a_measured_rate_callers_are_spread_all_the_same() -> None:
    admission = door(rows=200, tokens=100_000)
    admission.admit(200, 200)
    told = Counter(refused(admission).retry_after_s for _ in range(300))
    assert min(told) == 1
    assert len(told) >= 3


def test_a_call_whose_deadline_would_pass_in_line_is_refused_at_once_and_told_when_it_would_not() -> None:
    clock = Clock()
    admission = door(rows=1_000, tokens=100_000, clock=clock)
    line = served_at(admission, clock, rows_per_s=100, held=500)
    admission.admit(1, 1, Deadline.after_ms(8_000)).drop(served=False)
    short = refused(admission, 1, 1, Deadline.after_ms(2_000))
    assert 3 <= short.retry_after_s <= 6  # from 500 rows to 200
    for _ in range(500 - BUSY_ROWS):
        line.pop(0).drop()
    admission.admit(1, 1, Deadline.after_ms(5))


def test_calls_that_were_not_served_say_nothing_about_the_rate() -> None:
    clock = Clock()
    admission = door(rows=400, tokens=100_000, clock=clock)
    line = served_at(admission, clock, rows_per_s=50, held=400)
    for _ in range(300):
        line.pop().drop(served=False)
    admission.admit(300, 300)
    told = [refused(admission).retry_after_s for _ in range(100)]
    assert max(told) >= 2


def test_bytes_over_the_budget_are_refused_and_not_counted() -> None:
    budget = ByteBudget(100, Metrics())
    budget.take(80)
    with pytest.raises(Overloaded):
        budget.take(21)
    assert budget.held == 80
    budget.give_back(80)
    budget.take(100)


def test_bodies_that_find_no_room_are_told_to_come_one_after_another() -> None:
    clock = Clock()
    budget = ByteBudget(1_000, Metrics(), clock)
    budget.take(1_000)
    for _ in range(20):  # 200 bytes a second
        clock.now_s += 0.5
        budget.give_back(100)
        budget.take(100)
    told = []
    for _ in range(10):
        with pytest.raises(Overloaded) as caught:
            budget.take(150)
        told.append(caught.value.retry_after_s)
    assert told == sorted(told)
    assert told[0] <= 2
    assert 5 <= told[-1] <= 12


def test_texts_that_need_all_they_reserve_are_told_later_however_small_those_before_were() -> None:
    clock = Clock()
    admission = door(rows=1_000, tokens=10_000, clock=clock)
    for _ in range(100):
        lease = admission.admit(100)
        lease.shrink(10)
        lease.drop()
    for _ in range(100):
        lease = admission.admit(100)
        lease.shrink(100)
        lease.drop()
    admission.admit(9_990, 10)
    told = [refused(admission, 1_000).retry_after_s for _ in range(30)]
    assert max(told) >= 5  # 30,000 tokens at the first guess


def test_what_was_slow_an_hour_ago_refuses_nobody_for_a_deadline() -> None:
    clock = Clock()
    admission = door(rows=1_000, tokens=100_000, clock=clock)
    for lease in served_at(admission, clock, rows_per_s=10, held=100, seconds=20):
        lease.drop(served=False)
    clock.now_s += 3_600
    admission.admit(256, 256)
    admission.admit(1, 1, Deadline.after_ms(10_000))


def test_after_a_slow_hour_a_line_that_drains_well_is_believed_within_a_second() -> None:
    clock = Clock()
    admission = door(rows=1_000, tokens=100_000, clock=clock)
    for lease in served_at(admission, clock, rows_per_s=10, held=100, seconds=20):
        lease.drop(served=False)
    clock.now_s += 3_600
    served_at(admission, clock, rows_per_s=200, held=100, seconds=1)
    admission.admit(1_000 - admission.rows, 1_000 - admission.rows)
    assert refused(admission, 100, 100).retry_after_s <= 2


def test_rows_that_never_go_to_a_model_do_not_make_it_look_fast() -> None:
    clock = Clock()
    admission = door(rows=1_000, tokens=100_000, clock=clock)
    served_at(admission, clock, rows_per_s=50, held=500)
    for _ in range(100):
        clock.now_s += 0.001
        lease = admission.admit(256, 256)
        lease.shrink(0, 0)
        assert admission.rows == 500
        lease.drop()
    admission.admit(500, 500)
    assert refused(admission, 300, 300).retry_after_s >= 5
