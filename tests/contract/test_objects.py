"""One suite over the object stores: in memory, a local folder, and a real S3-compatible server."""

import asyncio
import hashlib
import os
import resource
import stat
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest

from jobs.objects import ObjectMissing, Objects, memory_objects, open_objects
from serving.errors import ConfigError, DependencyDown
from serving.settings import JobsSettings
from tests.s3 import KEYS, FaultProxy, S3Server

KEY = "jobs/job_0123456789abcdef0123456789abcdef/input"
PARTS = "jobs/job_0123456789abcdef0123456789abcdef/parts"
TIMEOUT_S = 2.0
LARGE = os.urandom(2**20) * 12
"""Over two parts of a multipart upload."""


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    name = "b" + hashlib.sha1(request.node.nodeid.encode()).hexdigest()
    s3_server.create_bucket(name)
    return name


def s3_objects(endpoint: str, bucket: str) -> Objects:
    return open_objects(
        JobsSettings(
            objects_url=f"s3://{bucket}/some/prefix",
            objects_endpoint=endpoint,
            objects_allow_http=True,
            objects_timeout_s=TIMEOUT_S,
        )
    )


def local_objects(folder: Path) -> Objects:
    return open_objects(JobsSettings(objects_url=f"file://{folder}", objects_timeout_s=TIMEOUT_S))


@pytest.fixture(params=["memory", "local", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "memory":
        return memory_objects()
    if request.param == "local":
        return local_objects(tmp_path / "objects")
    server: S3Server = request.getfixturevalue("s3_server")
    return s3_objects(server.endpoint, request.getfixturevalue("bucket"))


async def keys_of(objects: Objects, prefix: str = "jobs/") -> dict[str, int]:
    return {info.key: info.size_bytes async for info in objects.list(prefix)}


async def whole(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in stream])


async def write_cut(objects: Objects, data: bytes) -> None:
    async with objects.writer(KEY) as writer:
        await writer.write(data)
        raise RuntimeError("cut")


async def test_what_was_put_is_read_whole_and_by_ranges(objects: Objects) -> None:
    await objects.put(KEY, b"0123456789")
    assert await objects.get(KEY) == b"0123456789"
    assert await objects.get_range(KEY, 2, 5) == b"234"
    assert await objects.get_range(KEY, 4, 4) == b""
    assert await objects.size(KEY) == 10
    assert await whole(objects.stream(KEY)) == b"0123456789"
    assert await whole(objects.stream(KEY, 3, 9)) == b"345678"


async def test_a_put_replaces_the_object_as_a_whole(objects: Objects) -> None:
    await objects.put(KEY, b"a longer first version")
    await objects.put(KEY, b"second")
    assert await objects.get(KEY) == b"second"


async def test_what_is_not_there_is_missing_and_so_is_a_range_behind_the_end(objects: Objects) -> None:
    await objects.put(KEY, b"0123456789")
    for read in (
        objects.get(f"{PARTS}/00000000/none"),
        objects.get_range(f"{PARTS}/00000000/none", 0, 3),
        objects.size(PARTS),
        objects.get_range(KEY, 8, 12),
        objects.get_range(KEY, 10, 12),
        objects.get(f"{KEY}/below-an-object"),
        whole(objects.stream(f"{PARTS}/none")),
    ):
        with pytest.raises(ObjectMissing):
            await read


async def test_a_writer_makes_the_object_at_its_clean_end_only(objects: Objects) -> None:
    async with objects.writer(KEY) as writer:
        for first in range(0, len(LARGE), 700_000):
            await writer.write(LARGE[first : first + 700_000])
            assert KEY not in await keys_of(objects)
    assert await objects.size(KEY) == len(LARGE)
    assert await whole(objects.stream(KEY)) == LARGE
    assert await whole(objects.stream(KEY, 1_000_000, 9_000_001)) == LARGE[1_000_000:9_000_001]


async def test_a_writer_takes_small_inputs_and_empty_ones(objects: Objects) -> None:
    async with objects.writer(KEY) as writer:
        await writer.write(b"one ")
        await writer.write(b"two")
    async with objects.writer(f"{PARTS}/empty"):
        pass
    assert await objects.get(KEY) == b"one two"
    assert await objects.get(f"{PARTS}/empty") == b""


@pytest.mark.parametrize("written", [10, len(LARGE)])
async def test_a_writer_that_is_cut_leaves_nothing(objects: Objects, written: int) -> None:
    with pytest.raises(RuntimeError, match="cut"):
        await write_cut(objects, LARGE[:written])
    assert await keys_of(objects) == {}


async def test_a_writer_whose_task_is_cancelled_leaves_nothing(objects: Objects) -> None:
    started = asyncio.Event()

    async def write() -> None:
        async with objects.writer(KEY) as writer:
            await writer.write(LARGE)
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(write())
    await asyncio.wait_for(started.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await keys_of(objects) == {}


async def test_a_reader_may_stop_a_stream_at_any_moment(objects: Objects) -> None:
    await objects.put(KEY, LARGE)
    async with aclosing(objects.stream(KEY)) as stream:
        async for piece in stream:
            assert LARGE.startswith(piece)
            break


async def test_ranges_of_many_objects_come_in_order(objects: Objects) -> None:
    keys = [f"{PARTS}/{number:08d}/token" for number in range(20)]
    for number, key in enumerate(keys):
        await objects.put(key, b"%08d" % number)
    ranges = [(key, 4, 8) for key in keys]
    assert await whole(objects.stream_ranges(ranges)) == b"".join(b"%04d" % n for n in range(20))


async def test_lists_show_keys_sizes_and_times_under_a_prefix(objects: Objects) -> None:
    before = time.time()
    await objects.put(KEY, b"12345")
    await objects.put(f"{PARTS}/00000000/a-token", b"1")
    await objects.put("jobs/job_0123456789abcdef0123456789abcdef0/input", b"not under it")
    prefix = KEY.removesuffix("input")
    assert await keys_of(objects, prefix) == {KEY: 5, f"{PARTS}/00000000/a-token": 1}
    assert await keys_of(objects, "jobs/none/") == {}
    times = [info.modified_at.timestamp() async for info in objects.list("jobs/")]
    assert len(times) == 3
    assert all(before - 5 < moment < time.time() + 5 for moment in times)


async def test_deleting_takes_many_keys_and_does_not_mind_missing_ones(objects: Objects) -> None:
    keys = [f"{PARTS}/{number:08d}/token" for number in range(12)]
    for key in keys[::2]:
        await objects.put(key, b"1")
    await objects.put(KEY, b"stays")
    await objects.delete(keys)
    await objects.delete([])
    assert await keys_of(objects) == {KEY: 5}


async def test_ping_passes_on_a_store_that_answers(objects: Objects) -> None:
    await objects.ping()


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "jobs/../x", "jobs//x", "jobs/a b", "imports/default/x", "jobs/x#1"]
)
async def test_only_keys_of_our_own_shape_are_written(objects: Objects, key: str) -> None:
    with pytest.raises(ValueError, match="not a key"):
        await objects.put(key, b"")
    with pytest.raises(ValueError, match="not a key"):
        objects.writer(key)


async def test_imported_objects_are_never_deleted(objects: Objects) -> None:
    with pytest.raises(ValueError, match="not ours"):
        await objects.delete([KEY, "imports/default/file.jsonl"])


# A local folder


async def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    local_objects(tmp_path / "a" / "objects")
    assert stat.S_IMODE((tmp_path / "a" / "objects").stat().st_mode) == 0o700


async def test_what_a_killed_writer_left_is_listed_and_deleted(tmp_path: Path) -> None:
    objects = local_objects(tmp_path)
    await objects.put(KEY, b"x")
    (tmp_path / f"{KEY}#1").write_bytes(b"half of it")
    found = await keys_of(objects)
    assert found == {KEY: 1, f"{KEY}#1": 10}
    await objects.delete(list(found))
    assert list(tmp_path.iterdir()) == []


@contextmanager
def disk_that_takes(size_bytes: int) -> Iterator[None]:
    """The kernel refuses to write more to any file of this process, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_disk_that_takes_no_more_is_a_store_that_is_away_and_nothing_half_written_stays(tmp_path: Path) -> None:
    objects = local_objects(tmp_path)
    with disk_that_takes(2**20):
        with pytest.raises(DependencyDown):
            await objects.put(KEY, LARGE)
        with pytest.raises(DependencyDown):
            async with objects.writer(KEY) as writer:
                await writer.write(LARGE)
    assert await keys_of(objects) == {}
    await objects.put(KEY, LARGE)


async def test_a_disk_that_hangs_takes_no_thread_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = open_objects(JobsSettings(objects_url=f"file://{tmp_path}/objects", objects_timeout_s=0.05))
    going = threading.Event()
    monkeypatch.setattr(Path, "is_dir", lambda _: going.wait(10))
    with ThreadPoolExecutor(1) as others:
        asyncio.get_running_loop().set_default_executor(others)
        try:
            for _ in range(6):
                with pytest.raises(DependencyDown):
                    await objects.ping()
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 2) == "done"
        finally:
            going.set()


async def test_where_the_folder_is_gone_no_object_counts_as_missing(tmp_path: Path) -> None:
    objects = local_objects(tmp_path / "mounted")
    (tmp_path / "mounted").rmdir()
    for call in (objects.get(KEY), objects.get_range(KEY, 0, 1), objects.ping()):
        with pytest.raises(DependencyDown):
            await call


@pytest.mark.parametrize("url", ["file://relative/folder", "file:///", "ftp://host/x", "no url", "s3://"])
def test_an_address_that_is_none_is_an_error_for_the_operator(url: str) -> None:
    with pytest.raises(ConfigError, match="TWODOOR_JOBS_OBJECTS_URL"):
        open_objects(JobsSettings(objects_url=url))


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "az://container/prefix", "s3://bucket"])
def test_the_clouds_addresses_are_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    open_objects(JobsSettings(objects_url=url))


# S3, and what can become of it


async def test_aborted_uploads_leave_no_parts_in_the_bucket(s3_server: S3Server, bucket: str) -> None:
    objects = s3_objects(s3_server.endpoint, bucket)
    with pytest.raises(RuntimeError, match="cut"):
        await write_cut(objects, LARGE)
    assert b"<Upload>" not in s3_server.request("GET", f"/{bucket}?uploads")[1]


async def test_a_bucket_that_does_not_exist_is_a_store_that_is_away(s3_server: S3Server, bucket: str) -> None:
    objects = s3_objects(s3_server.endpoint, "nobody-made-this-bucket")
    for call in (objects.get(KEY), objects.get_range(KEY, 0, 1), objects.put(KEY, b"1"), objects.ping()):
        with pytest.raises(DependencyDown):
            await call
    with pytest.raises(DependencyDown):
        async with objects.writer(KEY) as writer:
            await writer.write(b"1")


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    made = FaultProxy(s3_server.port).start()
    yield made
    made.stop()


@pytest.mark.parametrize("kind", FaultProxy.KINDS)
async def test_a_store_in_trouble_gives_dependency_down_in_time_and_comes_back(
    proxy: FaultProxy, bucket: str, kind: str
) -> None:
    objects = s3_objects(proxy.endpoint, bucket)
    await objects.put(KEY, LARGE[: 2**20])

    async def write() -> None:
        async with objects.writer(f"{PARTS}/written") as writer:
            await writer.write(LARGE)

    async def bounded(call: Awaitable[object]) -> None:
        started = time.monotonic()
        with pytest.raises(DependencyDown):
            await call
        assert time.monotonic() - started < 2.5 * TIMEOUT_S

    proxy.fault(kind)
    calls: list[Awaitable[object]] = [
        objects.get(KEY),
        objects.put(KEY, LARGE[: 2**20]),
        write(),
        whole(objects.stream(KEY, 0, 2**20)),
    ]
    if kind != "slow":  # these exchanges are so small that they pass
        calls += [objects.ping(), objects.delete([KEY])]
    await asyncio.gather(*[bounded(call) for call in calls])
    assert proxy.hits > 0
    proxy.heal()
    await write()
    assert await objects.size(KEY) == 2**20
    assert await whole(objects.stream(f"{PARTS}/written")) == LARGE


async def test_a_hiccup_of_the_store_is_not_noticed(proxy: FaultProxy, bucket: str) -> None:
    objects = s3_objects(proxy.endpoint, bucket)
    await objects.put(KEY, b"0123456789")
    proxy.fault("error")
    read = asyncio.create_task(objects.get(KEY))
    while not proxy.hits:
        await asyncio.sleep(0.005)
    proxy.heal()
    assert await read == b"0123456789"


async def test_a_fault_in_the_middle_of_an_upload_ends_it_without_an_object(proxy: FaultProxy, bucket: str) -> None:
    objects = s3_objects(proxy.endpoint, bucket)

    async def write() -> None:
        async with objects.writer(KEY) as writer:
            await writer.write(LARGE)
            proxy.fault("reset")
            for _ in range(4):
                await writer.write(LARGE)

    with pytest.raises(DependencyDown):
        await write()
    proxy.heal()
    assert await keys_of(objects) == {}
