"""What an autoscaler reads of demand: rows in work, rows refused a moment ago, and 0 again when nobody asks."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from gateway.demand import Demand
from gateway.metrics import Metrics
from serving.errors import DependencyDown, EmptyText, Overloaded


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def demand(clock: Clock) -> Demand:
    made = Demand(60.0, clock)
    made.know(lambda: frozenset({"a", "b"}))
    return made


def fail(demand: Demand, model: str, rows: int, error: Exception) -> None:
    with suppress(type(error)), demand.wanted(model, rows):
        raise error


def test_every_known_model_has_a_value_before_anybody_asks(demand: Demand) -> None:
    assert demand.rows() == {"a": 0, "b": 0, "unknown": 0}


def test_rows_in_work_count_until_they_are_answered(demand: Demand) -> None:
    with demand.wanted("a", 3), demand.wanted("a", 2):
        assert demand.rows()["a"] == 5
    assert demand.rows()["a"] == 0


@pytest.mark.parametrize("error", [DependencyDown("away"), Overloaded("full")])
def test_refused_rows_count_for_the_window_and_no_longer(demand: Demand, clock: Clock, error: Exception) -> None:
    fail(demand, "a", 3, error)
    clock.now_s += 40
    fail(demand, "a", 1, error)
    fail(demand, "b", 7, error)
    assert demand.rows() == {"a": 4, "b": 7, "unknown": 0}
    clock.now_s += 30
    assert demand.rows() == {"a": 1, "b": 7, "unknown": 0}
    clock.now_s += 61
    assert demand.rows() == {"a": 0, "b": 0, "unknown": 0}


def test_a_caller_s_own_fault_is_no_demand_that_was_left(demand: Demand) -> None:
    fail(demand, "a", 3, EmptyText("empty"))
    assert demand.rows()["a"] == 0


def test_names_nobody_knows_share_one_label_and_leave_nothing_behind(demand: Demand) -> None:
    for number in range(1_000):
        fail(demand, f"made-up-{number}", 1, DependencyDown("away"))
    assert demand.rows() == {"a": 0, "b": 0, "unknown": 1_000}
    assert len(demand._refused) == 1
    assert not demand._waiting


def test_a_model_that_comes_later_gets_its_label(clock: Clock) -> None:
    names = {"a"}
    demand = Demand(60.0, clock)
    demand.know(lambda: names)
    names.add("late")
    fail(demand, "late", 2, DependencyDown("away"))
    assert demand.rows()["late"] == 2


def test_the_gateway_s_metrics_show_it() -> None:
    metrics = Metrics()
    metrics.demand.know(lambda: frozenset({"a"}))
    shown: Callable[[], bytes] = metrics.render
    assert b'twodoor_demand_rows{model="a"} 0.0' in shown()
    with metrics.demand.wanted("a", 4):
        assert b'twodoor_demand_rows{model="a"} 4.0' in shown()
