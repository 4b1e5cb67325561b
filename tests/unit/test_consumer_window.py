"""A partition's window: what may be committed, what may be read, and what is remembered beyond the process."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_consumer.offsets import start_of
from batch_consumer.partition import MAX_METADATA_CHARS, Record, Window, read_suspects, write_suspects
from batch_consumer.records import Form, Request, Source
from serving.errors import ModelFailed


def make_window(position: int = 0, records: int = 100, size: int = 2**20) -> Window:
    return Window(position, {}, records, size)


def make_record(window: Window, offset: int, rows: int = 1, value: bytes = b"v") -> Record:
    record = Record(window, Source("t", 0, offset), b"k", (), value)
    record.expect(Request(f"r{offset}", "m", ("x",) * rows, rows > 1, False, Form.JSON))
    return record


@given(st.permutations(range(12)))
def test_only_the_contiguous_finished_prefix_may_be_committed(order: list[int]) -> None:
    window = make_window()
    records = [make_record(window, offset) for offset in range(12)]
    window.add(records)
    done: set[int] = set()
    for offset in order:
        records[offset].finish(0, ModelFailed("x"))
        done.add(offset)
        expected = next((n for n in range(13) if n not in done), 12)
        assert [record.source.offset for record in window.prefix(100)] == list(range(expected))


def test_a_record_is_finished_when_all_its_rows_are_and_a_second_outcome_changes_nothing() -> None:
    window = make_window()
    record = make_record(window, 0, rows=2)
    window.add([record])
    first = ModelFailed("first")
    record.finish(0, first)
    record.finish(0, ModelFailed("second"))
    assert window.finished == 0
    record.finish(1, ModelFailed("x"))
    assert window.finished == 1
    assert record.outcomes[0] is first


def test_records_without_rows_are_finished_at_once_but_wait_for_those_before_them() -> None:
    window = make_window()
    slow = make_record(window, 0)
    tombstone = Record(window, Source("t", 0, 1), b"k", (), None)
    window.add([slow, tombstone])
    assert window.finished == 0
    slow.finish(0, ModelFailed("x"))
    assert window.finished == 2


def test_the_window_closes_for_reading_by_records_rows_and_bytes() -> None:
    window = make_window(records=10)
    window.add([make_record(window, 0, rows=4)])
    assert window.room == 6
    window.add([make_record(window, 1, rows=20)])
    assert window.room == 0
    heavy = make_window(size=1_000)
    heavy.add([make_record(heavy, 0, value=b"x" * 2_000)])
    assert heavy.room == 0


def test_committing_frees_the_room_and_moves_the_position() -> None:
    window = make_window(position=5, records=3)
    records = [make_record(window, offset) for offset in (5, 8, 9)]
    window.add(records)
    records[0].finish(0, ModelFailed("x"))
    records[1].finish(0, ModelFailed("x"))
    window.committed(window.prefix(100))
    assert window.position == 9
    assert window.room == 2
    assert window.uncommitted == 1


def test_a_closed_window_ignores_what_still_comes_in() -> None:
    window = make_window()
    record = make_record(window, 0)
    window.add([record])
    window.close()
    assert not record.alive
    record.finish(0, ModelFailed("x"))
    record.suspect(0, 2)
    assert window.finished == 0
    assert window.suspects == {}
    assert window.room == 0


def test_a_stopped_window_starts_no_row_but_takes_what_still_runs() -> None:
    window = make_window()
    record = make_record(window, 0)
    window.add([record])
    window.stop()
    assert not record.alive
    record.finish(0, ModelFailed("x"))
    assert window.finished == 1


def test_a_suspect_has_to_be_remembered_and_an_acquitted_one_only_along_the_way() -> None:
    window = make_window()
    record = make_record(window, 7)
    window.add([record])
    record.suspect(0, 1)
    assert window.remember
    assert write_suspects(window.suspects, 0) == "twodoor1 7.0.1"
    window.remember = False
    record.suspect(0, None)
    assert not window.remember
    assert write_suspects(window.suspects, 0) == ""


@given(st.dictionaries(st.tuples(st.integers(0, 10**15), st.integers(0, 1023)), st.integers(0, 3), max_size=30))
def test_suspects_survive_being_written_and_read(suspects: dict[tuple[int, int], int]) -> None:
    assert read_suspects(write_suspects(suspects, 0)) == suspects


def test_suspects_behind_the_position_are_forgotten_and_too_many_keep_those_with_most_deaths() -> None:
    assert read_suspects(write_suspects({(3, 0): 1, (9, 0): 1}, 5)) == {(9, 0): 1}
    many = {(offset, 0): int(offset == 7_777) for offset in range(10_000)}
    text = write_suspects(many, 0)
    assert len(text) <= MAX_METADATA_CHARS + 20
    assert read_suspects(text)[7_777, 0] == 1


@pytest.mark.parametrize("metadata", ["", None, "somebody else's", "twodoor1 1.2", "twodoor1 a.b.c", "twodoor2 1.1.1"])
def test_metadata_of_anybody_else_counts_as_none(metadata: Any) -> None:
    assert read_suspects(metadata) == {}


@pytest.mark.parametrize(
    ("committed", "known", "beginning", "end", "position", "gap"),
    [
        (None, None, 0, 5, 0, 0),
        (3, None, 0, 5, 3, 0),
        (5, 5, 0, 5, 5, 0),
        (1_000_000_000, None, 0, 5, 0, 999_999_995),
        (100, None, 0, 5, 0, 95),
        (3, None, 10, 20, 10, 7),
        (None, 100, 0, 5, 0, 95),
    ],
)
def test_a_place_that_no_longer_exists_is_told_with_its_gap_and_work_begins_at_the_beginning(
    committed: int | None, known: int | None, beginning: int, end: int, position: int, gap: int
) -> None:
    start = start_of(committed, known, beginning, end)
    assert start.position == position
    assert start.gap == gap
    assert bool(start.lost) == bool(gap)
