"""Results: all lines, their errors, any range of either, and an honest end where the store fails in the middle."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from gateway.job_door import Stores
from gateway.results import MOST_DOWNLOADS
from jobs.memory import MemoryLedger
from jobs.objects import ObjectMissing, Objects
from serving.errors import DependencyDown
from tests.integration.gateway_jobs import Door, job_door, memory_stores, problem, rows_of, until

ROWS = 25
FAILING = (0, 7, 8, 24)


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with job_door(jobs={"chunk_rows": 10}) as opened:
        yield opened


async def ended(door: Door) -> str:
    """Return the path of the results of a job of three parts."""
    job = await door.submit(*[f"row {row}" for row in range(ROWS)])
    await door.work(failing=FAILING)
    return f"/v1/jobs/{job['id']}/results"


async def part(door: Door, path: str, value: str, **headers: str) -> httpx.Response:
    return await door.client.get(path, headers={"range": value, **headers})


async def test_all_lines_come_in_row_order_with_their_length(door: Door) -> None:
    path = await ended(door)
    whole = await door.client.get(path)
    assert whole.status_code == 200
    assert whole.headers["content-type"] == "application/x-ndjson"
    assert whole.headers["accept-ranges"] == "bytes"
    assert int(whole.headers["content-length"]) == len(whole.content)
    rows = rows_of(whole.content)
    assert [row["index"] for row in rows] == list(range(ROWS))
    assert [row["index"] for row in rows if "error" in row] == list(FAILING)
    head = await door.client.head(path)
    assert head.content == b""
    for name in ("content-length", "content-type", "etag", "accept-ranges"):
        assert head.headers[name] == whole.headers[name]


async def test_only_errors_are_the_error_lines_of_the_whole(door: Door) -> None:
    path = await ended(door)
    whole = (await door.client.get(path)).content
    response = await door.client.get(path, params={"only": "errors"})
    expected = b"".join(line + b"\n" for line in whole.split(b"\n") if b'"error"' in line)
    assert response.content == expected
    assert int(response.headers["content-length"]) == len(expected)
    part_of_it = await part(door, f"{path}?only=errors", "bytes=60-200")
    assert part_of_it.content == expected[60:201]
    assert response.headers["etag"] != (await door.client.head(path)).headers["etag"]


async def test_every_range_is_those_bytes_of_the_whole(door: Door) -> None:
    path = await ended(door)
    whole = (await door.client.get(path)).content
    size = len(whole)
    cases = [(first, last) for first in range(0, size, 211) for last in (first, first + 1, first + 500, size + 10)]
    for first, last in cases:
        response = await part(door, path, f"bytes={first}-{last}")
        end = min(last, size - 1)
        assert response.status_code == 206
        assert response.content == whole[first : end + 1]
        assert response.headers["content-range"] == f"bytes {first}-{end}/{size}"
        assert int(response.headers["content-length"]) == end + 1 - first
    for value, start in (("bytes=100-", 100), ("bytes=-40", size - 40), (f"bytes=-{size * 2}", 0)):
        response = await part(door, path, value)
        assert (response.status_code, response.content) == (206, whole[start:])


async def test_a_range_behind_the_end_is_416_and_one_that_is_none_is_the_whole(door: Door) -> None:
    path = await ended(door)
    size = int((await door.client.head(path)).headers["content-length"])
    for value in (f"bytes={size}-", f"bytes={size + 5}-{size + 9}", "bytes=-0"):
        response = await part(door, path, value)
        problem(response, 416, "range_not_satisfiable")
        assert response.headers["content-range"] == f"bytes */{size}"
    for value in ("bytes=5-2", "bytes=-", "bytes=a-b", "rows=0-5", "bytes=0-1,4-5", "bytes=1-2-3", "bytes=٣-٤"):
        response = await door.client.get(path, headers={"range": value.encode()})
        assert (response.status_code, len(response.content)) == (200, size)
        assert "content-range" not in response.headers


async def test_head_tells_the_length_of_all_whatever_range_is_asked_for(door: Door) -> None:
    path = await ended(door)
    whole = await door.client.head(path)
    for value in ("bytes=0-1", "bytes=999999-"):
        response = await door.client.head(path, headers={"range": value})
        assert (response.status_code, response.headers["content-length"]) == (200, whole.headers["content-length"])
        assert "content-range" not in response.headers


async def test_a_download_goes_on_only_with_the_same_version(door: Door) -> None:
    path = await ended(door)
    whole = await door.client.get(path)
    going_on = await part(door, path, "bytes=50-", **{"if-range": whole.headers["etag"]})
    assert (going_on.status_code, going_on.content) == (206, whole.content[50:])
    for other in ('"other"', f"W/{whole.headers['etag']}", "Sat, 29 Oct 1994 19:43:31 GMT"):
        response = await part(door, path, "bytes=50-", **{"if-range": other})
        assert (response.status_code, response.content) == (200, whole.content)


async def test_before_the_end_it_is_409_or_the_finished_prefix(door: Door) -> None:
    job = await door.submit(*["row"] * ROWS)
    path = f"/v1/jobs/{job['id']}/results"
    problem(await door.client.get(path), 409, "job_not_ended")
    empty = await door.client.get(path, params={"partial": "true"})
    assert (empty.status_code, empty.content, empty.headers["content-length"]) == (200, b"", "0")
    problem(await part(door, f"{path}?partial=true", "bytes=0-"), 416, "range_not_satisfiable")
    seen, etags = b"", set()
    for done in (10, 20, ROWS):
        await door.work(chunks=1)
        response = await door.client.get(path, params={"partial": "true"})
        assert [row["index"] for row in rows_of(response.content)] == list(range(done))
        assert response.content.startswith(seen)
        seen = response.content
        etags.add(response.headers["etag"])
    assert len(etags) == 3
    assert (await door.client.get(path)).content == seen
    progress = (await door.job(job["id"]))["progress"]
    assert progress == 1


async def test_a_wrong_query_is_400(door: Door) -> None:
    path = await ended(door)
    for query in ("only=good", "partial=yes", "x=1", "only=errors&only=errors"):
        problem(await door.client.get(f"{path}?{query}"), 400, "invalid_request")


class Flaky(Objects):
    """A store of which the reads begin to fail after so many; what a real one does is in the tests of the stores."""

    reads_left = 10**9

    def stream_ranges(self, ranges: Iterable[tuple[str, int, int]]) -> AsyncGenerator[bytes, None]:
        return self._some(super().stream_ranges(ranges))

    async def _some(self, pieces: Any) -> AsyncGenerator[bytes, None]:
        async for piece in pieces:
            if self.reads_left <= 0:
                raise DependencyDown("the object store does not answer")
            self.reads_left -= 1
            yield piece


@pytest.fixture
async def flaky() -> AsyncIterator[tuple[Door, Flaky]]:
    objects = Flaky(memory_stores().objects._store, 5)
    async with job_door(Stores(MemoryLedger(), objects), jobs={"chunk_rows": 10}) as opened:
        yield opened, objects


async def test_a_store_that_fails_in_the_middle_ends_the_connection(flaky: tuple[Door, Flaky]) -> None:
    door, objects = flaky
    path = await ended(door)
    whole = (await door.client.get(path)).content
    objects.reads_left = 2
    got = bytearray()
    with pytest.raises(httpx.RemoteProtocolError):
        await _read(door, path, got)
    assert 0 < len(got) < len(whole)
    assert whole.startswith(got)
    objects.reads_left = 10**9
    assert got + (await part(door, path, f"bytes={len(got)}-")).content == whole


async def test_a_store_that_is_away_from_the_first_byte_on_is_503(flaky: tuple[Door, Flaky]) -> None:
    door, objects = flaky
    path = await ended(door)
    objects.reads_left = 0
    response = await door.client.get(path)
    problem(response, 503, "dependency_down")
    assert int(response.headers["retry-after"]) >= 1
    assert (await door.client.head(path)).status_code == 200


async def test_a_store_that_hangs_before_the_first_byte_is_504_at_the_callers_deadline(
    flaky: tuple[Door, Flaky],
) -> None:
    door, objects = flaky
    path = await ended(door)

    async def silent(pieces: Any) -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    objects._some = silent  # type: ignore[method-assign]
    problem(await door.client.get(path, headers={"x-timeout-ms": "100"}), 504, "deadline_exceeded")


async def test_a_caller_who_leaves_ends_the_reading(flaky: tuple[Door, Flaky]) -> None:
    door, objects = flaky
    path = await ended(door)
    closed = asyncio.Event()

    async def endless(pieces: Any) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"x" * 10
                await asyncio.sleep(0.02)
        finally:
            closed.set()

    objects._some = endless  # type: ignore[method-assign]
    async with door.client.stream("GET", path) as response:
        async for _ in response.aiter_raw():
            break
    await asyncio.wait_for(closed.wait(), 5)


async def test_so_many_downloads_at_one_time_and_no_more(flaky: tuple[Door, Flaky]) -> None:
    door, objects = flaky
    path = await ended(door)
    going = asyncio.Event()

    async def held(pieces: Any) -> AsyncGenerator[bytes, None]:
        async for piece in pieces:
            yield piece
            await going.wait()

    objects._some = held  # type: ignore[method-assign]
    async with AsyncExitStack() as stack:
        for _ in range(MOST_DOWNLOADS):
            await stack.enter_async_context(door.client.stream("GET", path))
        response = await door.client.get(path)
        problem(response, 503, "overloaded")
        assert int(response.headers["retry-after"]) >= 1
        assert (await door.client.head(path)).status_code == 200
        assert 'twodoor_shed_total{reason="downloads"} 1.0' in (await door.client.get("/metrics")).text
    going.set()

    async def free() -> bool:
        return (await door.client.get(path)).status_code == 200

    await until(free, "the places of those who left are free")
    answers = await asyncio.gather(*(door.client.get(path) for _ in range(MOST_DOWNLOADS)))
    assert {response.status_code for response in answers} == {200}
    objects._some = Flaky._some.__get__(objects)  # type: ignore[method-assign]
    objects.reads_left = 0
    for _ in range(MOST_DOWNLOADS + 1):
        problem(await door.client.get(path), 503, "dependency_down")


@pytest.mark.parametrize("deleted", [True, False])
async def test_parts_that_are_missing_are_404_where_the_job_was_deleted_meanwhile_and_503_otherwise(
    flaky: tuple[Door, Flaky], deleted: bool
) -> None:
    door, objects = flaky
    path = await ended(door)

    async def missing(pieces: Any) -> AsyncGenerator[bytes, None]:
        if deleted:
            await door.ledger.delete("default", path.split("/")[3])
        raise ObjectMissing("no object")
        yield b""

    objects._some = missing  # type: ignore[method-assign]
    problem(await door.client.get(path), *((404, "not_found") if deleted else (503, "dependency_down")))


async def _read(door: Door, path: str, into: bytearray) -> None:
    async with door.client.stream("GET", path) as response:
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            into += piece
