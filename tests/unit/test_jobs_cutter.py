"""How an input becomes chunks: the row rules, whatever the blocks it comes in."""

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from jobs.cutter import Cutter
from jobs.records import ChunkPlan
from serving.errors import InvalidJob
from serving.settings import JobsSettings


def settings(**changed: int) -> JobsSettings:
    return JobsSettings(**{"chunk_rows": 3, "chunk_bytes": 1024, "max_row_bytes": 1024, **changed})


def cut(blocks: Sequence[bytes], limits: JobsSettings) -> list[ChunkPlan]:
    cutter = Cutter(limits)
    plans = [plan for block in blocks for plan in cutter.feed(block)]
    plans += cutter.finish()
    assert cutter.size_bytes == sum(map(len, blocks))
    assert cutter.row_count == sum(plan.row_count for plan in plans)
    return plans


def rows_of(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """The rules once more, slowly: (start, end, line, content) of each row."""
    rows = []
    position = 3 if data.startswith(b"\xef\xbb\xbf") else 0
    for line, raw in enumerate(data[position:].split(b"\n"), 1):
        end = min(position + len(raw) + 1, len(data))
        if raw.strip(b" \t\r"):
            rows.append((position, end, line, raw.removesuffix(b"\r")))
        position += len(raw) + 1
    return rows


def check(data: bytes, plans: Sequence[ChunkPlan], limits: JobsSettings) -> None:
    rows = rows_of(data)
    assert sum(plan.row_count for plan in plans) == len(rows)
    for plan in plans:
        own = rows[plan.first_row : plan.first_row + plan.row_count]
        assert (plan.start_byte, plan.end_byte, plan.first_line) == (own[0][0], own[-1][1], own[0][2])
        assert plan.oversized == (len(own[0][3]) > limits.max_row_bytes)
        assert not plan.oversized or plan.row_count == 1
        assert plan.row_count <= limits.chunk_rows
        assert plan.row_count == 1 or plan.end_byte - plan.start_byte <= limits.chunk_bytes
    assert [plan.first_row for plan in plans] == [sum(p.row_count for p in plans[:i]) for i in range(len(plans))]


lines = st.one_of(
    st.sampled_from(
        [b"", b"\r", b" \t", b"  \r", b'"a"', b'"a"\r', b" 1", b"\xef\xbb\xbf", b"\xef", b"\xff\r\r", b"\x0b"]
    ),
    st.integers(1, 60).map(lambda n: b"x" * n * 40),
    st.binary(max_size=8),
)
inputs = st.builds(
    lambda bom, parts, tail: bom + b"\n".join(parts) + tail,
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb", b"\xef\xbb\xbf\xef\xbb\xbf"]),
    st.lists(lines, max_size=24),
    st.sampled_from([b"", b"\n", b"\r\n\r\n"]),
)


@tries(deadline=None)
@given(inputs, st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 5))
def test_chunks_cover_exactly_the_rows_however_the_input_is_split(data: bytes, at: list[int], chunk_rows: int) -> None:
    limits = settings(chunk_rows=chunk_rows)
    edges = [0, *sorted(min(a, len(data)) for a in at), len(data)]
    plans = cut([data[a:b] for a, b in pairwise(edges)], limits)
    check(data, plans, limits)
    assert plans == cut([data], limits)


@tries(deadline=None, max_examples=30)
@given(inputs)
def test_chunks_do_not_depend_on_the_blocks_even_byte_by_byte(data: bytes) -> None:
    assert cut([data[i : i + 1] for i in range(len(data))], settings()) == cut([data], settings())


def test_a_windows_file_gives_its_two_rows_with_their_lines() -> None:
    data = b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n\r\n'
    assert cut([data], settings()) == [ChunkPlan(3, len(data) - 2, 0, 2, 1)]


def test_rows_are_not_cut_at_line_separators_of_unicode() -> None:
    data = '"a\u2028b\x85c\u2029d"\n"e"'.encode()
    assert [plan.row_count for plan in cut([data], settings())] == [2]


def test_a_row_over_the_limit_is_a_chunk_of_its_own_and_its_neighbours_keep_their_lines() -> None:
    data = b'"a"\n' + b"x" * 1025 + b'\r\n"b"\n' + b"y" * 1024 + b"\r\n"
    plans = cut([data], settings())
    assert [(p.first_row, p.row_count, p.first_line, p.oversized) for p in plans] == [
        (0, 1, 1, False),
        (1, 1, 2, True),
        (2, 1, 3, False),
        (3, 1, 4, False),
    ]


def test_a_long_run_of_blank_lines_is_never_part_of_a_chunk() -> None:
    plans = cut([b'"a"\n' + b" " * 5000 + b"\n" * 5000 + b'"b"'], settings())
    assert [(p.end_byte - p.start_byte, p.first_line) for p in plans] == [(4, 1), (3, 5002)]


def test_an_input_of_nothing_but_blanks_has_no_chunk() -> None:
    for data in (b"", b"\n", b"\r\n \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"):
        assert cut([data], settings()) == []


def test_more_rows_than_the_limit_are_refused_while_they_come() -> None:
    cutter = Cutter(settings(max_rows=10), field="inputs")
    cutter.feed(b'"a"\n' * 10)
    with pytest.raises(InvalidJob) as refused:
        cutter.feed(b'"a"\n')
    assert (refused.value.field, refused.value.limit) == ("inputs", 10)


def test_cutting_50_mb_takes_a_fraction_of_a_second_of_cpu() -> None:
    block = b'{"id": 1, "text": "a row of about the usual size, sixty bytes"}\n' * 16_384
    cutter = Cutter(settings(chunk_rows=512, chunk_bytes=2**20))
    started = time.process_time()
    for _ in range(50):
        cutter.feed(block)
    assert time.process_time() - started < 3
    assert cutter.row_count == 50 * 16_384
