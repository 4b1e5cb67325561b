"""A job's result as one text over its parts: lengths, ranges, and the error lines alone."""

import pytest
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from jobs.objects import ObjectMissing, memory_objects
from jobs.records import Part
from jobs.results import ByteRange, Unsatisfiable, parse_range, plan_results

PARTS = [(b"", b""), (b"0123456789", b"34"), (b"ab", b""), (b"", b""), (b"XYZ", b"XYZ")]


def parts() -> list[Part]:
    return [Part(f"jobs/j/parts/{n:08d}/t", n, 1, len(r), len(e)) for n, (r, e) in enumerate(PARTS)]


@pytest.mark.parametrize(("only_errors", "text"), [(False, b"0123456789abXYZ"), (True, b"34XYZ")])
async def test_any_range_of_the_result_is_read_from_the_parts_in_order(only_errors: bool, text: bytes) -> None:
    objects = memory_objects()
    for part, (results, errors) in zip(parts(), PARTS, strict=True):
        await objects.put(part.key, results + errors)
    plan = plan_results(parts(), only_errors)
    assert plan.total_bytes == len(text)
    assert b"".join([piece async for piece in plan.stream(objects)]) == text
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            pieces = [piece async for piece in plan.stream(objects, ByteRange(start, end))]
            assert b"".join(pieces) == text[start:end]


def test_a_job_without_errors_has_an_empty_text_of_them() -> None:
    assert plan_results(parts()[2:3], only_errors=True).total_bytes == 0
    assert plan_results([]).total_bytes == 0


async def test_a_part_that_was_deleted_meanwhile_ends_the_download() -> None:
    with pytest.raises(ObjectMissing):
        _ = [piece async for piece in plan_results(parts()).stream(memory_objects())]


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("bytes=0-0", ByteRange(0, 1)),
        ("bytes=2-5", ByteRange(2, 6)),
        ("bytes=2-", ByteRange(2, 10)),
        ("bytes=2-99", ByteRange(2, 10)),
        ("bytes=-3", ByteRange(7, 10)),
        ("bytes=-99", ByteRange(0, 10)),
        ("Bytes= 9- ", ByteRange(9, 10)),
        (None, None),
        ("", None),
        ("bytes=", None),
        ("bytes=-", None),
        ("bytes=5-2", None),
        ("bytes=0-1,3-4", None),
        ("bytes=a-b", None),
        ("rows=0-1", None),
        ("bytes=0x1-2", None),
        ("bytes=٣-٤", None),
        ("bytes=" + "9" * 5000 + "-", None),
    ],
)
def test_a_range_header_means_one_range_or_nothing(header: str | None, found: ByteRange | None) -> None:
    assert parse_range(header, 10) == found


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-12", "bytes=-0", "bytes=999-1000"])
def test_a_range_without_a_byte_of_the_text_cannot_be_satisfied(header: str) -> None:
    found = parse_range(header, 10)
    assert isinstance(found, Unsatisfiable)
    assert found.header(10) == "bytes */10"


def test_no_range_of_an_empty_text_can_be_satisfied() -> None:
    assert isinstance(parse_range("bytes=0-", 0), Unsatisfiable)
    assert isinstance(parse_range("bytes=-5", 0), Unsatisfiable)


@tries(deadline=None)
@given(st.text("bytes=0123456789-, ", max_size=30), st.integers(0, 100))
def test_no_header_makes_trouble(header: str, total: int) -> None:
    found = parse_range(header, total)
    assert not isinstance(found, ByteRange) or 0 <= found.start < found.end <= total


def test_a_range_tells_its_place_in_the_whole() -> None:
    assert ByteRange(2, 6).header(10) == "bytes 2-5/10"
