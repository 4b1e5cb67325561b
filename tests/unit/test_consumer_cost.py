"""What a micro-batch of any shape costs, from a few that were timed."""

import pytest

from batch_consumer.cost import CostTable, shapes_to_time
from batch_consumer.pace import Pace

TIMED = {(1, 16): 2.0, (8, 16): 9.0, (32, 16): 33.0, (1, 64): 4.0, (8, 64): 25.0, (32, 64): 97.0}


def test_a_timed_shape_costs_what_was_timed_and_one_between_two_lies_between() -> None:
    table = CostTable(TIMED)
    assert all(table.ms(*shape) == pytest.approx(ms) for shape, ms in TIMED.items())
    assert table.ms(4, 16) == pytest.approx(2 + 3 * 7 / 7)
    assert table.ms(8, 40) == pytest.approx((9 + 25) / 2)
    assert table.ms(1, 16) < table.ms(2, 20) < table.ms(8, 64)


def test_a_larger_shape_never_costs_less_also_beyond_the_table() -> None:
    table = CostTable(TIMED)
    for length in (1, 16, 50, 64, 300, 512):
        costs = [table.ms(rows, length) for rows in range(1, 65)]
        assert costs == sorted(costs)
    for rows in (1, 5, 32, 64):
        costs = [table.ms(rows, length) for length in range(1, 513)]
        assert costs == sorted(costs)
    assert table.ms(64, 64) == pytest.approx(97 + 32 * 3)


def test_a_shape_that_was_not_timed_is_taken_for_a_smaller_one_grown_in_proportion() -> None:
    table = CostTable({(1, 16): 2.0, (8, 16): 9.0, (1, 64): 4.0})
    assert table.ms(8, 64) >= 9 * 4
    lone = CostTable({(1, 16): 2.0})
    assert lone.ms(4, 32) == pytest.approx(2.0 * 2 * 4)


def test_shapes_are_few_inside_the_bounds_and_go_from_cheap_to_dear() -> None:
    shapes = shapes_to_time(max_rows=32, max_tokens=512, max_padded=4096)
    assert 4 <= len(shapes) <= 9
    assert shapes == sorted(shapes, key=lambda shape: shape[0] * shape[1])
    assert all(rows == 1 or rows * length <= 4096 for rows, length in shapes)
    assert shapes_to_time(max_rows=1, max_tokens=8, max_padded=512) == [(1, 8)]


def test_the_pace_follows_the_instances_and_keeps_what_it_learnt_from_a_full_queue() -> None:
    pace = Pace(1)
    assert pace.of(3) == 3
    pace.refused()
    assert pace.of(3) == 1
    assert pace.of(5) == 1
    for _ in range(100):
        pace.succeeded()
    assert pace.of(5) == 5
    assert pace.of(2) == 2
