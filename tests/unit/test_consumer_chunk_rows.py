"""A chunk's bytes become rows, and rows with outcomes a part: by the same row rules as the cutter, each row one line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_consumer.chunk_rows import ChunkRow, parse_rows, rows_too_large
from batch_consumer.parts import render_part
from jobs.cutter import Cutter
from jobs.records import ChunkPlan
from serving.errors import InputLost, ModelFailed, RowError
from serving.postprocess import Classification
from serving.settings import JobsSettings

PIECES = [
    b"\n",
    b"\r\n",
    b"\r",
    b" ",
    b"\t",
    b"\xef\xbb\xbf",
    b'"a"',
    b'{"text": "b"}',
    b"{",
    b"\xff",
    b"\xe2\x80\xa8",
    b"\0",
]
ANSWER = Classification("positive", 0.9, {"positive": 0.9}, True)


@given(st.lists(st.sampled_from(PIECES), max_size=60).map(b"".join), st.integers(1, 5))
def test_what_the_cutter_counted_is_what_is_read_with_the_right_lines(data: bytes, chunk_rows: int) -> None:
    cutter = Cutter(JobsSettings(chunk_rows=chunk_rows))  # type: ignore[call-arg]
    plans = [*cutter.feed(data), *cutter.finish()]
    rows = [row for plan in plans for row in parse_rows(data[plan.start_byte : plan.end_byte], plan, True)]
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [number for number, line in enumerate(lines, 1) if line.strip(b" \t\r")]
    assert [row.line for row in rows] == expected


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"text": "x", "id": "i", "more": [1]}', None),
        (b'{"text": "x", "id": null}', None),
        (b'  "x"  ', None),
        ('"\u2028\x85"'.encode(), None),
        (b'{"id": "i"}', "invalid_row"),
        (b'{"text": null}', "invalid_row"),
        (b'{"text": "x", "id": 1}', "invalid_row"),
        (b'{"text": "x", "id": ""}', None),
        (b'{"text": "x", "id": "' + b"i" * 1_025 + b'"}', "row_too_large"),
        (b'{"text": "x", "id": "\\ud800"}', "invalid_unicode"),
        (b'["x"]', "invalid_row"),
        (b"null", "invalid_row"),
        (b"NaN", "invalid_json"),
        (b"7" * 5_000, "invalid_json"),
        (b'"x" "y"', "invalid_json"),
        (b'"x', "invalid_json"),
        (b'"\xc3"', "invalid_unicode"),
        (b"[" * 100_000, "invalid_json"),
        (b'\xef\xbb\xbf"x"', "invalid_json"),
    ],
)
def test_each_row_is_judged_by_itself(line: bytes, code: str | None) -> None:
    plan = ChunkPlan(10, 10 + len(line), 0, 1, 7)
    (row,) = parse_rows(line, plan, True)
    assert (row.error.code if row.error else None) == code
    assert row.line == 7
    assert (row.text is None) == (code is not None)


def test_bytes_with_another_number_of_rows_are_not_the_accepted_input() -> None:
    with pytest.raises(InputLost):
        parse_rows(b'"a"\n"b"\n', ChunkPlan(0, 8, 0, 3, 1), True)


def test_a_part_holds_all_lines_and_then_the_error_lines_once_more() -> None:
    rows = [ChunkRow("x", "a\u2028"), ChunkRow("y", line=4), ChunkRow("z")]
    outcomes: list[Classification | RowError] = [ANSWER, ModelFailed("it failed"), ANSWER]
    part = render_part(rows, outcomes, 100)
    done = part.done("key")
    lines = part.data.decode().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [100, 101, 102, 101]
    assert json.loads(lines[0])["id"] == "a\u2028"
    assert json.loads(lines[1])["error"] == {"code": "model_failed", "message": "it failed", "line": 4}
    assert (done.succeeded, done.failed) == (2, 1)
    assert part.data[: done.result_bytes].count(b"\n") == 3
    assert json.loads(part.data[done.result_bytes :])["index"] == 101
    assert done.result_bytes + done.error_bytes == len(part.data)


def test_a_row_over_the_limit_is_told_with_its_line_only_where_the_job_has_lines() -> None:
    plan = ChunkPlan(0, 3_000, 5, 1, 9, oversized=True)
    assert [(row.line, row.error.code) for row in rows_too_large(plan, True) if row.error] == [(9, "row_too_large")]
    assert [row.line for row in rows_too_large(plan, False)] == [None]
