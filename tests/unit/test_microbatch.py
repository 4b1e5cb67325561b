"""Which rows go next, by the promises of the micro-batch: the oldest first, neighbours in length, bounds, turns."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_consumer.microbatch import Backlog, padding_ratio
from batch_consumer.rows import Outcome, Row
from batch_consumer.turns import TOPIC, Feeder, job_feeder


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


def row(tokens: int, age: int = 0, feeder: Feeder = TOPIC, owner: Sink | None = None) -> Row:
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


def served(backlog: Backlog, batches: int, rows: int = 16) -> Counter[Feeder]:
    return Counter(one.feeder for _ in range(batches) for one in backlog.take(rows, 4096))


GIANT, SMALL = job_feeder("a", 1.0, "giant"), job_feeder("a", 1.0, "small")


def test_topic_and_jobs_take_equal_turns_however_many_jobs_and_rows_there_are() -> None:
    backlog = filled([row(10, age) for age in range(200)])
    for job in range(8):
        for age in range(300):
            backlog.add(row(10, 200 + age, job_feeder(f"t{job % 4}", 1.0, f"job{job}")))
    counts = served(backlog, 20)
    assert counts[TOPIC] == 160
    assert counts.total() == 320
    assert {counts[feeder] for feeder in counts if feeder != TOPIC} <= {16, 32}


def test_tenants_get_rows_by_weight_within_ten_percent_whoever_has_more_rows_waiting() -> None:
    light, heavy = job_feeder("light", 1.0, "j1"), job_feeder("heavy", 3.0, "j2")
    rows = [row(5 + (age * 7919) % 40, age, light) for age in range(6_000)]
    rows += [row(5 + (age * 7919) % 40, age, heavy) for age in range(2_000)]
    counts = served(filled(rows), 70, rows=32)
    assert counts[heavy] / counts[light] == pytest.approx(3.0, rel=0.1)


def test_two_jobs_of_a_heavy_tenant_share_its_part_equally() -> None:
    feeders = [job_feeder("light", 1.0, "j"), job_feeder("heavy", 3.0, "j1"), job_feeder("heavy", 3.0, "j2")]
    counts = served(filled([row(20, age, feeder) for age in range(2_000) for feeder in feeders]), 160)
    assert [round(counts[feeder] / 16) for feeder in feeders] == [40, 60, 60]


def test_a_small_job_behind_a_giant_one_gets_every_second_micro_batch() -> None:
    backlog = filled([row(10 + age % 30, age, GIANT) for age in range(1_000)])
    served(backlog, 5)
    for age in range(64):
        backlog.add(row(10 + age % 30, 1_000 + age, SMALL))
    turns = [backlog.take(16, 4096)[0].feeder for _ in range(8)]
    assert 4 <= turns.count(SMALL) < 8
    assert served(backlog, 10, 16)[GIANT] >= 144


def test_a_micro_batch_is_filled_from_others_where_its_feeder_has_too_few_rows() -> None:
    backlog = filled([row(10, age, GIANT) for age in range(100)])
    for age in range(3):
        backlog.add(row(10, 100 + age, SMALL))
    assert Counter(one.feeder for one in backlog.take(16, 4096)) == {GIANT: 16}
    assert Counter(one.feeder for one in backlog.take(16, 4096)) == {SMALL: 3, GIANT: 13}


def test_rows_that_only_filled_up_others_batches_keep_a_feeder_back_for_a_bounded_time() -> None:
    backlog = filled([row(5 + age, age, SMALL) for age in range(100)])
    for age in range(20_000):
        backlog.add(row(5 + (age % 100), 100 + age, GIANT))
    served(backlog, 60)
    newcomer = job_feeder("a", 1.0, "newcomer")
    for age in range(5_000):
        backlog.add(row(250, 30_000 + age, newcomer))
    assert served(backlog, 100)[GIANT] >= 400


def test_a_feeder_that_wakes_does_not_make_up_for_the_time_it_slept() -> None:
    backlog = filled([row(10, age) for age in range(320)])
    served(backlog, 10)
    for age in range(320):
        backlog.add(row(300, 320 + age, GIANT))
    seeds = [backlog.take(16, 16 * 300)[0].feeder for _ in range(8)]
    assert seeds.count(GIANT) == 4


def test_a_feeder_that_had_the_lane_for_itself_is_not_kept_back_when_another_comes_while_it_sleeps() -> None:
    backlog = filled([row(10, age, GIANT) for age in range(3_200)])
    assert served(backlog, 200)[GIANT] == 3_200
    for age in range(640):
        backlog.add(row(10, age, SMALL))
    served(backlog, 1)
    for age in range(640):
        backlog.add(row(10, age, GIANT))
    assert served(backlog, 20)[GIANT] >= 144


@given(st.data())
def test_with_feeders_of_all_kinds_every_row_still_comes_out_once_and_no_batch_waits_for_a_turn(
    data: st.DataObject,
) -> None:
    feeders = [TOPIC, *(job_feeder(t, w, j) for t, w in (("a", 1.0), ("b", 3.0)) for j in ("1", "2"))]
    lengths = data.draw(st.lists(st.tuples(st.sampled_from(feeders), st.integers(1, 64)), min_size=1, max_size=80))
    rows = [row(tokens, age, feeder) for age, (feeder, tokens) in enumerate(lengths)]
    backlog, taken = filled(rows), []
    while batch := backlog.take(8, 256, 1.5):
        left = [one for one in rows if one not in taken and one.feeder == batch[0].feeder]
        assert batch[0] is left[0]
        taken += batch
    assert sorted(one.index for one in taken) == list(range(len(rows)))


def test_jobs_that_come_and_go_leave_nothing_behind() -> None:
    backlog = Backlog()
    for number in range(2_000):
        backlog.add(row(10, number, job_feeder(f"tenant{number % 3}", 1.0, f"job{number}")))
        backlog.take(32, 4096)
    assert len(backlog) == 0
    assert len(backlog._turns._times) < 300


@pytest.mark.parametrize("tokens", [1, 600])
def test_a_single_row_goes_whatever_its_length(tokens: int) -> None:
    assert len(filled([row(tokens)]).take(32, 512)) == 1
