"""Which rows go next, by the promises of the micro-batch: the oldest first, neighbours in length, bounds, turns."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_consumer.microbatch import Backlog, padding_ratio
from batch_consumer.rows import Outcome, Row


@dataclass
class Sink:
    """An owner that takes everything."""

    alive: bool = True
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    suspects: dict[int, int | None] = field(default_factory=dict)

    def finish(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome

    def suspect(self, index: int, deaths: int | None) -> None:
        self.suspects[index] = deaths


def row(tokens: int, age: int = 0, feeder: str = "topic", owner: Sink | None = None) -> Row:
    made = Row(owner or Sink(), age, "m", "text", feeder=feeder, arrived_s=float(age))
    made.tokens = tokens
    return made


def filled(rows: list[Row]) -> Backlog:
    backlog = Backlog()
    for one in rows:
        backlog.add(one)
    return backlog


@given(
    st.lists(st.integers(1, 512), min_size=1, max_size=120),
    st.integers(1, 40),
    st.integers(16, 4096),
    st.floats(1.0, 3.0),
)
def test_every_row_comes_out_once_and_each_batch_keeps_its_bounds_around_the_oldest(
    lengths: list[int], max_rows: int, max_tokens: int, max_padding: float
) -> None:
    rows = [row(tokens, age) for age, tokens in enumerate(lengths)]
    backlog = filled(rows)
    taken: list[Row] = []
    while batch := backlog.take(max_rows, max_tokens, max_padding):
        left = [one for one in rows if one not in taken]
        assert batch[0] is left[0]
        assert len(batch) <= max_rows
        if len(batch) > 1:
            assert max(one.tokens for one in batch) * len(batch) <= max_tokens
            assert padding_ratio(batch) <= max_padding + 1e-9
        taken += batch
    assert sorted(one.index for one in taken) == list(range(len(rows)))
    assert len(backlog) == 0


def test_neighbours_in_length_go_together_whatever_came_between() -> None:
    backlog = filled([row(tokens, age) for age, tokens in enumerate([10, 200, 11, 199, 10, 201, 12])])
    assert sorted(one.tokens for one in backlog.take(32, 4096)) == [10, 10, 11, 12]
    assert sorted(one.tokens for one in backlog.take(32, 4096)) == [199, 200, 201]


def test_a_deep_backlog_of_many_lengths_is_hardly_padded() -> None:
    backlog = filled([row(5 + (age * 7919) % 60, age) for age in range(2_000)])
    ratios = []
    while batch := backlog.take(32, 4096):
        ratios.append(padding_ratio(batch))
    assert sum(ratios) / len(ratios) < 1.1


def test_rows_nobody_waits_for_are_skipped_and_no_longer_counted() -> None:
    gone = Sink()
    backlog = filled([row(10, 0, owner=gone), row(10, 1), row(500, 2, owner=gone), row(11, 3)])
    gone.alive = False
    assert [one.index for one in backlog.take(32, 4096)] == [1, 3]
    assert backlog.take(32, 4096) == []
    assert len(backlog) == 0


def test_dropping_the_dead_keeps_the_others_in_order() -> None:
    gone = Sink()
    backlog = filled([row(10, 0, owner=gone), row(20, 1), row(10, 2, owner=gone), row(21, 3)])
    gone.alive = False
    backlog.drop_dead()
    assert len(backlog) == 2
    assert backlog.oldest_s() == 1.0
    assert [one.index for one in backlog.take(32, 4096)] == [1, 3]


def test_feeders_take_turns_by_rows_so_that_a_deep_one_does_not_keep_back_the_other() -> None:
    backlog = filled([row(10, age, "topic") for age in range(1_000)])
    for age in range(64):
        backlog.add(row(300, 1_000 + age, "chunks"))
    first_four = [backlog.take(16, 16 * 300) for _ in range(4)]
    assert [batch[0].feeder for batch in first_four] == ["topic", "chunks", "topic", "chunks"] or [
        batch[0].feeder for batch in first_four
    ] == ["chunks", "topic", "chunks", "topic"]


def test_a_feeder_that_wakes_does_not_make_up_for_the_time_it_slept() -> None:
    backlog = filled([row(10, age, "topic") for age in range(320)])
    for _ in range(10):
        backlog.take(16, 4096)
    for age in range(320):
        backlog.add(row(300, 320 + age, "chunks"))
    seeds = [backlog.take(16, 16 * 300)[0].feeder for _ in range(8)]
    assert seeds.count("chunks") == 4


@pytest.mark.parametrize("tokens", [1, 600])
def test_a_single_row_goes_whatever_its_length(tokens: int) -> None:
    assert len(filled([row(tokens)]).take(32, 512)) == 1
