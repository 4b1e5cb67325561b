"""The job door over stores in memory and a model that fails as told: each row one line, whatever goes away meanwhile."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from structlog.testing import capture_logs

from batch_consumer import chunk_work, pace, suspects
from batch_consumer.chunk_rows import parse_rows
from batch_consumer.chunks import CHUNKS_PER_JOB
from batch_consumer.rows import Row
from jobs.forms import JobRequest
from jobs.intake import JobIntake, Submitter
from jobs.states import Status
from serving.errors import ModelDied, ModelFailed, ModelNotReady
from serving.settings import JobsSettings
from tests.unit.job_house import House, closed, result_lines, stores, submit, until
from tests.unit.test_consumer_lane import World

ROWS = [f"row {index:03}" for index in range(100)]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "DEATH_JITTER_S", 0.001)


@pytest.fixture
def world() -> World:
    return World()


async def assert_each_row_once(ledger: Any, objects: Any, job: Any, codes: dict[int, str] | None = None) -> None:
    lines = await result_lines(ledger, objects, job)
    assert [line["index"] for line in lines] == list(range(job.rows_total))
    found = {line["index"]: line["error"]["code"] for line in lines if "error" in line}
    assert found == (codes or {})
    assert [line["index"] for line in await result_lines(ledger, objects, job, errors=True)] == sorted(found)


async def keys(objects: Any, job: Any) -> set[str]:
    return {info.key async for info in objects.list(f"jobs/{job.id}/")}


async def test_a_job_comes_out_row_by_row_in_order_and_nothing_else_is_left(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ROWS)
    async with House(world, ledger, objects).running() as house:
        done = await closed(ledger, job)
        assert done.status is Status.COMPLETED
        assert (done.rows_succeeded, done.rows_failed, done.model_version) == (100, 0, "1")
        await assert_each_row_once(ledger, objects, done)
        assert house.sample("twodoor_rows_total", lane="bulk", model="m", outcome="ok") == 100
        assert len(await keys(objects, job)) == 1 + 4
        assert ledger.calls.count("complete") == 4


async def test_bad_rows_are_errors_with_their_lines_and_harm_nobody(world: World) -> None:
    ledger, objects = stores()
    body = b"\r\n".join(
        [
            b'\xef\xbb\xbf"one"', b"", b'{"id": "b", "text": "two"}', b"{broken", b'\xef\xbb\xbf"bom"', b" \t ",
            b'"\xff"', b'{"id": 5, "text": "x"}', b'{"id": "g", "text": 5}', b'{"id": "h"}', b"12", b"1" * 5_000,
            '"a\u2028b\x85c"'.encode(), b'{"id": "n\\u0000", "text": "\\ud800"}', b'"' + b"x" * 3_000 + b'"', b'"last"',
        ]
    )  # fmt: skip
    job = await submit(ledger, objects, body, chunk_rows=4)
    async with House(world, ledger, objects).running():
        done = await closed(ledger, job)
    lines = await result_lines(ledger, objects, done)
    shown = [
        (line.get("id"), line.get("error", {}).get("code", "ok"), line.get("error", {}).get("line")) for line in lines
    ]
    assert shown == [
        (None, "ok", None), ("b", "ok", None), (None, "invalid_json", 4), (None, "invalid_json", 5),
        (None, "invalid_unicode", 7), (None, "invalid_row", 8), ("g", "invalid_row", 9), ("h", "invalid_row", 10),
        (None, "invalid_row", 11), (None, "row_too_large", 12), (None, "ok", None), ("n\0", "invalid_unicode", 14),
        (None, "row_too_large", 15), (None, "ok", None),
    ]  # fmt: skip


async def test_rows_of_a_json_body_have_no_lines(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ["fine", None, 5, {"id": "x", "text": "y"}])
    async with House(world, ledger, objects).running():
        lines = await result_lines(ledger, objects, await closed(ledger, job))
    assert [line.get("error", {}).get("code") for line in lines] == [None, "invalid_row", "invalid_row", None]
    assert all("line" not in line.get("error", {}) for line in lines)
    assert lines[3]["id"] == "x"


async def test_a_cancelled_job_keeps_its_answers_and_the_rest_costs_the_model_nothing(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, [f"row {index}" for index in range(2_000)])
    async with House(world, ledger, objects).running() as house:
        await until(lambda: len(world.requests) > 10)
        await ledger.cancel("default", job.id)
        await until(lambda: house.lane.count_in_flight() == 0 and not house.lane.has_work())
        asked = len(world.requests)
        done = await closed(ledger, job)
        assert len(world.requests) - asked <= 3
    assert done.status is Status.CANCELLED
    lines = await result_lines(ledger, objects, done)
    codes = Counter(line.get("error", {}).get("code", "ok") for line in lines)
    assert [line["index"] for line in lines] == list(range(2_000))
    assert set(codes) == {"ok", "job_cancelled"}
    assert codes["ok"] == done.rows_succeeded >= 300


async def test_cancelling_while_the_model_is_away_closes_the_job_at_once(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, [{"id": name, "text": name} for name in ROWS])
    async with House(world, ledger, objects).running() as house:
        await until(lambda: bool(house.leases.chunks))
        world.ready = False
        await ledger.cancel("default", job.id)
        done = await closed(ledger, job)
    lines = await result_lines(ledger, objects, done)
    assert [line["id"] for line in lines] == ROWS


async def test_an_input_that_is_gone_fails_the_job_and_each_row_by_its_index(world: World) -> None:
    ledger, objects = stores()
    accepted = await JobIntake(ledger, objects, JobsSettings(chunk_rows=32)).submit(  # type: ignore[call-arg]
        JobRequest("m", inputs=ROWS), Submitter("default"), request_id="r-1"
    )
    job = accepted.job
    await objects.delete([f"jobs/{job.id}/input"])
    with capture_logs() as logs:
        async with House(world, ledger, objects).running():
            done = await closed(ledger, job)
    steps = [(line["from_status"], line["to_status"], line["request_id"]) for line in logs if line["event"] == "job"]
    assert steps == [("queued", "running", "r-1"), ("running", "failing", "r-1")]
    assert (done.status, done.error_code) == (Status.FAILED, "input_lost")
    await assert_each_row_once(ledger, objects, done, dict.fromkeys(range(100), "job_failed"))
    assert world.requests == []


@pytest.mark.parametrize("away", ["ledger", "objects"])
async def test_a_store_that_goes_away_uses_up_nothing_and_no_row_is_asked_twice(world: World, away: str) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ROWS)
    store = {"ledger": ledger, "objects": objects}[away]

    def leave(name: str) -> None:
        if len(world.requests) >= 2:
            store.is_away = True

    ledger.before = objects.before = leave
    async with House(world, ledger, objects).running() as house:
        await until(lambda: store.is_away and house.lane.count_in_flight() == 0 and not house.lane.has_work())
        await asyncio.sleep(0.1)
        ledger.before = objects.before = lambda name: None
        store.is_away = False
        done = await closed(ledger, job)
        assert house.sample("twodoor_leases_lost_total") == 0
    await assert_each_row_once(ledger, objects, done)
    assert Counter(text for request in world.requests for text in request) == Counter(ROWS)
    assert max(chunk.generation for chunk in ledger._state.jobs[job.id].chunks) == 1


async def test_an_answer_of_the_ledger_that_was_lost_makes_no_second_result(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ROWS[:20])
    lost: list[str] = []
    complete = ledger._store.complete

    async def complete_and_lose(claim: Any, done: Any) -> bool:
        answer = await complete(claim, done)
        if not lost:
            lost.append("answer")
            ledger.away_for.add("renew")
            from serving.errors import DependencyDown

            raise DependencyDown("the answer was lost")
        return bool(answer)

    ledger._store.complete = complete_and_lose
    async with House(world, ledger, objects).running() as house:
        done = await closed(ledger, job)
        ledger.away_for.clear()
        await until(lambda: not house.leases.chunks)
        assert house.sample("twodoor_leases_lost_total") == 0
    await assert_each_row_once(ledger, objects, done)


async def test_a_lease_that_another_took_drops_the_rows_and_leaves_no_part_behind(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ROWS[:32])
    world.ready = False
    first = House(world, ledger, objects)
    world.ready = True
    hold = asyncio.Event()

    async def slow(*args: Any, **more: Any) -> Any:
        await hold.wait()
        return await World.infer(world, *args, **more)

    world.infer = slow  # type: ignore[method-assign]
    async with first.running():
        await until(lambda: first.lane.count_in_flight() == 32)
        (kept,) = ledger._state.jobs[job.id].chunks
        kept.lease.until = None
        claim = await ledger.claim("other", {"m": ("1",)}, [], 15.0)
        assert claim is not None
        await until(lambda: not first.leases.chunks)
        assert first.sample("twodoor_leases_lost_total") == 1
        hold.set()
        await until(lambda: first.lane.count_in_flight() == 0)
        await ledger.release([claim])
        done = await closed(ledger, job)
    await assert_each_row_once(ledger, objects, done)
    assert len(await keys(objects, job)) == 2


async def test_the_ledger_away_for_longer_than_the_lease_loses_nothing_where_nobody_else_came(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ROWS)
    world.ready = False
    async with House(world, ledger, objects, lease_s=1.1).running() as house:
        world.ready = True
        await until(lambda: bool(house.leases.chunks))
        world.ready = False
        ledger.is_away = True
        for chunk in ledger._state.jobs[job.id].chunks:
            chunk.lease.until = ledger._state.clock() if chunk.lease.until else None
        await asyncio.sleep(0.1)
        world.ready = True
        ledger.is_away = False
        done = await closed(ledger, job)
        assert house.sample("twodoor_leases_lost_total") == 0
    await assert_each_row_once(ledger, objects, done)
    assert max(chunk.generation for chunk in ledger._state.jobs[job.id].chunks) == 1


async def test_deaths_are_remembered_in_the_chunk_row_and_go_on_counting_with_the_next_consumer(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ROWS[:32])
    alone: list[str] = []

    def die(world: World, texts: list[str]) -> Exception | None:
        if "row 013" not in texts:
            return None
        if len(texts) == 1:
            alone.append("died")
            if len(alone) == 2:
                world.ready = False
        return ModelDied("died")

    world.fault = die
    first = House(world, ledger, objects, "first")
    async with first.running():
        await until(lambda: not world.ready)
    (chunk,) = ledger._state.jobs[job.id].chunks
    assert 13 in chunk.suspects
    remembered = chunk.suspects[13].deaths
    assert remembered >= 1
    assert chunk.token is None
    world.ready = True
    async with House(world, ledger, objects, "second").running():
        done = await closed(ledger, job)
    await assert_each_row_once(ledger, objects, done, {13: "row_crashed"})
    assert len(alone) <= 4


async def test_suspicion_reaches_the_ledger_before_the_row_has_run_alone_again(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ROWS[:8])
    order: list[str] = []

    def note(name: str) -> None:
        if name == "remember":
            order.append(name)

    ledger.before = note

    def fail(world: World, texts: list[str]) -> Exception | None:
        if "row 003" in texts:
            order.append(f"asked {len(texts)}")
            return ModelFailed("failed")
        return None

    world.fault = fail
    async with House(world, ledger, objects).running():
        done = await closed(ledger, job)
    await assert_each_row_once(ledger, objects, done, {3: "model_failed"})
    assert order.index("remember") < len(order) - 1


async def test_pause_holds_jobs_too_and_the_heartbeat_says_so(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, [f"row {index}" for index in range(1_000)])
    async with House(world, ledger, objects).running():
        await until(lambda: len(world.requests) > 5)
        await ledger.set_paused(True)
        states = []
        async with asyncio.timeout(5):
            while (state := (await ledger.bulk_state(10.0)).state) != "paused":
                states.append(state)
                await asyncio.sleep(0.003)
        asked = len(world.requests)
        assert set(states) <= {"pausing"}
        await asyncio.sleep(0.1)
        assert len(world.requests) == asked
        other = await submit(ledger, objects, ["x"])
        await ledger.cancel("default", other.id)
        assert (await closed(ledger, other)).status is Status.CANCELLED
        ledger.is_away = True
        await asyncio.sleep(0.05)
        assert len(world.requests) == asked
        ledger.is_away = False
        await ledger.set_paused(False)
        done = await closed(ledger, job)
    await assert_each_row_once(ledger, objects, done)


async def test_a_consumer_that_starts_in_a_pause_runs_nothing(world: World) -> None:
    ledger, objects = stores()
    await ledger.set_paused(True)
    job = await submit(ledger, objects, ROWS)
    house = House(world, ledger, objects)
    house.lane.paused = True
    house.lane.submit([Row(World(), 0, "m", "topic row")])
    async with house.running():
        await until(lambda: house.leases.is_up)
        await asyncio.sleep(0.1)
        assert world.requests == []
        await ledger.set_paused(False)
        await closed(ledger, job)


async def test_a_consumer_that_starts_without_its_ledger_serves_the_topics(world: World) -> None:
    ledger, objects = stores()
    ledger.is_away = True
    house = House(world, ledger, objects)
    house.lane.paused = True
    topic = World()
    house.lane.submit([Row(topic, 0, "m", "topic row")])
    async with house.running():
        await until(lambda: len(topic.outcomes) == 1)
        ledger.is_away = False


async def test_sigterm_gives_claims_back_without_counting_and_the_next_consumer_finishes_them(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, [f"row {index}" for index in range(1_000)])
    async with House(world, ledger, objects, "first").running():
        await until(lambda: len(world.requests) > 5)
    chunks = ledger._state.jobs[job.id].chunks
    assert all(chunk.done or chunk.token is None for chunk in chunks)
    assert not (await ledger.bulk_state(10.0)).consumers
    async with House(world, ledger, objects, "second").running():
        done = await closed(ledger, job)
    await assert_each_row_once(ledger, objects, done)
    assert sum(len(request) for request in world.requests) <= 1_000 + 4 * 32


async def test_claims_are_bounded_in_all_and_for_each_job(world: World) -> None:
    ledger, objects = stores()
    giant = await submit(ledger, objects, [f"row {index}" for index in range(320)])
    hold = asyncio.Event()

    async def wait(*args: Any, **more: Any) -> Any:
        await hold.wait()
        return await World.infer(world, *args, **more)

    world.infer = wait  # type: ignore[method-assign]
    async with House(world, ledger, objects, max_chunks=6).running() as house:
        await until(lambda: len(house.leases.chunks) == CHUNKS_PER_JOB)
        await asyncio.sleep(0.1)
        assert len(house.leases.chunks) == CHUNKS_PER_JOB
        small = [await submit(ledger, objects, ["x"]) for _ in range(20)]
        await until(lambda: len(house.leases.chunks) == 6)
        await asyncio.sleep(0.1)
        assert len(house.leases.chunks) == 6
        hold.set()
        for job in [giant, *small]:
            await closed(ledger, job)


async def test_jobs_whose_model_is_away_do_not_keep_the_others_waiting(world: World) -> None:
    ledger, objects = stores()
    stuck = [await submit(ledger, objects, ["x"], model="m") for _ in range(4)]
    async with House(world, ledger, objects, max_chunks=2).running() as house:
        world.fault = lambda world, texts: ModelNotReady("gone")
        await until(lambda: len(house.leases.chunks) == 2)
        world.ready_versions = ("2",)
        free = await submit(ledger, objects, ["y"])
        world.fault = lambda world, texts: None
        assert (await closed(ledger, free)).model_version == "2"
        world.ready_versions = ("2", "1")
        for job in stuck:
            await closed(ledger, job)


async def test_a_job_is_cancelled_also_in_a_pause_with_as_many_claims_as_may_be_held(world: World) -> None:
    ledger, objects = stores()
    others = [await submit(ledger, objects, ROWS * 8, chunk_rows=200) for _ in range(2)]
    async with House(world, ledger, objects, max_chunks=4).running() as house:
        await until(lambda: len(house.leases.chunks) == 4)
        await ledger.set_paused(True)
        await until(lambda: house.lane.paused and house.lane.count_in_flight() == 0)
        assert sum(not chunk.is_settled for chunk in house.leases.chunks.values()) == 4
        late = await submit(ledger, objects, ROWS)
        await ledger.cancel("default", late.id)
        assert (await closed(ledger, late)).status is Status.CANCELLED
        assert not any([(await ledger.get("default", job.id)).status.ended for job in others])
        await ledger.set_paused(False)
        for job in others:
            await assert_each_row_once(ledger, objects, await closed(ledger, job))


async def test_a_job_is_cancelled_also_while_all_claims_that_may_be_held_wait_for_a_model_that_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, objects = stores()
    answers = asyncio.Event()
    infer = world.infer

    async def hang(*given: Any, **more: Any) -> Any:
        await answers.wait()
        return await infer(*given, **more)

    monkeypatch.setattr(world, "infer", hang)
    others = [await submit(ledger, objects, ROWS) for _ in range(2)]
    async with House(world, ledger, objects, max_chunks=4).running() as house:
        await until(lambda: len(house.leases.chunks) == 4)
        late = await submit(ledger, objects, ROWS)
        await ledger.cancel("default", late.id)
        assert (await closed(ledger, late)).status is Status.CANCELLED
        # Its own chunks may just be let go.
        assert sum(chunk.job != late.id for chunk in house.leases.chunks) == 4
        await until(lambda: len(house.leases.chunks) == 4)
        answers.set()
        for job in others:
            await assert_each_row_once(ledger, objects, await closed(ledger, job))


async def test_a_chunk_that_breaks_its_consumer_again_and_again_rests_and_keeps_nobody_else_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, objects = stores()
    bad = await submit(ledger, objects, ROWS[:40])
    broken: list[bytes] = []
    is_mended = False

    def parse(data: bytes, *more: Any) -> Any:
        if b"row 000" in data and not is_mended:
            broken.append(data)
            raise KeyError("a bug")
        return parse_rows(data, *more)

    monkeypatch.setattr(chunk_work, "parse_rows", parse)
    monkeypatch.setattr(pace, "MAX_REST_S", 0.2)
    async with House(world, ledger, objects).running() as house:
        await until(lambda: any(chunk.is_resting for chunk in house.leases.chunks.values()))
        good = await submit(ledger, objects, ROWS[40:])
        await assert_each_row_once(ledger, objects, await closed(ledger, good))
        is_mended = True
        await assert_each_row_once(ledger, objects, await closed(ledger, bad))
        assert house.sample("twodoor_retries_total", reason="internal_error") == len(broken) >= 5
    assert [chunk.generation for chunk in ledger._state.jobs[bad.id].chunks] == [len(broken) + 1, 1]


async def test_a_chunk_that_rests_ends_at_once_with_its_job_and_holds_up_no_other_of_it(world: World) -> None:
    ledger, objects = stores()
    job = await submit(ledger, objects, ROWS)
    for chunk in ledger._state.jobs[job.id].chunks[:3]:
        chunk.generation = 40
    async with House(world, ledger, objects).running() as house:
        await until(lambda: sum(chunk.is_resting for chunk in house.leases.chunks.values()) == 3)
        await until(lambda: house.door.progress == 1)
        await ledger.cancel("default", job.id)
        done = await closed(ledger, job)
    await assert_each_row_once(ledger, objects, done, dict.fromkeys(range(96), "job_cancelled"))


async def test_two_tenants_get_rows_by_weight_and_the_topic_its_half(world: World) -> None:
    ledger, objects = stores()
    light, heavy = Submitter("light", 1.0), Submitter("heavy", 3.0)
    for tenant in (light, heavy):
        await submit(
            ledger, objects, [f"{tenant.tenant[0]} {index:04}" for index in range(6_000)], tenant, chunk_rows=512
        )

    async def slow(*args: Any, **more: Any) -> Any:
        await asyncio.sleep(0.005)
        return await World.infer(world, *args, **more)

    world.infer = slow  # type: ignore[method-assign]
    topic = World()
    async with House(world, ledger, objects).running() as house:
        await until(lambda: len({text[0] for request in world.requests for text in request}) == 2)
        house.lane.submit([Row(topic, index, "m", f"t {index:04}") for index in range(2_000)])
        await until(lambda: bool(topic.outcomes))
        asked = len(world.requests)
        await until(lambda: len(topic.outcomes) >= 1_500)
        counts = Counter(text[0] for request in world.requests[asked:] for text in request)
        assert counts["t"] / counts.total() == pytest.approx(0.5, abs=0.06)
        assert counts["h"] / counts["l"] == pytest.approx(3.0, rel=0.1)


async def test_a_small_job_behind_a_giant_one_is_done_long_before_it(world: World) -> None:
    ledger, objects = stores()
    giant = await submit(ledger, objects, [f"g {index:05}" for index in range(20_000)], chunk_rows=512)
    async with House(world, ledger, objects).running():
        await until(lambda: len(world.requests) > 20)
        before = sum(len(request) for request in world.requests)
        small = await submit(ledger, objects, [f"s {index:02}" for index in range(50)])
        await closed(ledger, small)
        served = sum(len(request) for request in world.requests) - before
        assert served < 5_000
        await ledger.cancel("default", giant.id)
        await closed(ledger, giant)
