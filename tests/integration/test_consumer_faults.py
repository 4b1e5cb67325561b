"""The model, Triton or Kafka goes away under a consumer: rows wait or are judged, and nothing is lost or doubled."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from local_stack.stack import Stack
from tests.integration.consumer_parts import (
    Consumer,
    Topics,
    ToSend,
    assert_each_once,
    make_topics,
    produce,
    request,
    results,
)
from tests.parts import Triton, remove, wait_until
from tests.stubs import BUILT, DIE, FAIL, NAN, SLEEP, STUB, stub_score, write_repository, write_stub

GOOD = "a gorgeous, witty, seductive movie"
BOTH_LANES = "stub_both_lanes"
"""A model too large to be held twice: bulk work and callers share its instances."""


@pytest.fixture(scope="module")
def faulty_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("repository")
    write_repository(folder, models=())
    write_stub(folder, BOTH_LANES, BUILT / "sentiment_model" / "tokenizer", bulk=False)
    yield folder
    remove(folder)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, faulty_repository: Path) -> Iterator[Stack]:
    """A Kafka and a Triton that may be killed; the supervisor starts a dead one again, as in production."""
    environment = {"TWODOOR_STACK_CANARY_INTERVAL_S": "0.5", "TWODOOR_STACK_RESTART_BACKOFF_MAX_S": "0.5"}
    with Stack(
        tmp_path_factory.mktemp("stack"), ("kafka", "triton"), faulty_repository, environment=environment
    ) as stack:
        yield stack


@pytest.fixture
def make_consumer(stack: Stack, faulty_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: list[Consumer] = []

    def make(topics: Topics, **settings: object) -> Consumer:
        folder = tmp_path_factory.mktemp("consumer")
        made.append(Consumer(folder, stack.kafka, stack.triton_grpc, faulty_repository, topics, **settings))
        return made[-1]

    yield make
    for consumer in made:
        consumer.kill()


@pytest.mark.timeout(300)
async def test_a_row_that_kills_the_model_is_condemned_after_three_deaths_and_no_neighbour_is(
    stack: Stack, make_consumer: Any
) -> None:
    topics = await make_topics(stack.kafka)
    names = [f"r{index}" for index in range(60)]
    texts = {name: f"{GOOD} {name}" for name in names} | {"r31": f"{GOOD} {DIE}"}
    await produce(stack.kafka, topics.requests, [request(name, texts[name]) for name in names])
    first = make_consumer(topics).start()
    await asyncio.to_thread(wait_until, lambda: '"deaths": 2' in first.log(), "two deaths", 120)
    # The deaths so far are in the committed offset: a consumer that comes after this one goes on counting.
    await asyncio.to_thread(
        wait_until,
        lambda: first.count('twodoor_rows_total{lane="bulk",model="stub_faulty",outcome="ok"}') > 0,
        "a commit",
    )
    await asyncio.sleep(1)
    first.kill()
    second = make_consumer(topics).start()
    found = await results(stack.kafka, topics, len(names), 120)
    assert_each_once(found, names)
    by_name = {result["id"]: result for result in found}
    assert by_name.pop("r31")["error"]["code"] == "row_crashed"
    for name, result in by_name.items():
        assert result["output"]["score"] == pytest.approx(stub_score(texts[name]), abs=1e-6)
    assert '"deaths": 3' in second.log()
    assert '"deaths": 1' not in second.log()


@pytest.mark.timeout(180)
async def test_rows_in_flight_when_triton_goes_away_wait_and_are_answered_once(
    stack: Stack, make_consumer: Any
) -> None:
    topics = await make_topics(stack.kafka)
    names = [f"t{index}" for index in range(1_200)]
    await produce(stack.kafka, topics.requests, [request(name, f"{GOOD} {name}") for name in names])
    consumer = make_consumer(topics, TWODOOR_CONSUMER_STALL_TIMEOUT_S=2).start()
    await asyncio.to_thread(wait_until, lambda: "twodoor_rows_total" in str(consumer.metrics()), "first result", 60)
    await asyncio.to_thread(stack.stop_service, "triton")
    await asyncio.to_thread(wait_until, lambda: consumer.ready()["triton"] == "down", "triton seen down")
    # Waiting for a model that is away is no stall, however long it takes.
    for _ in range(30):
        assert consumer.healthy()
        await asyncio.sleep(0.1)
    await asyncio.to_thread(stack.start_service, "triton")
    assert_each_once(await results(stack.kafka, topics, len(names), 90), names)
    assert "row_crashed" not in str(await results(stack.kafka, topics, len(names)))


@pytest.mark.timeout(180)
async def test_kafka_that_restarts_in_the_middle_costs_no_result_and_none_comes_twice(
    stack: Stack, make_consumer: Any
) -> None:
    topics = await make_topics(stack.kafka)
    names = [f"k{index}" for index in range(1_200)]
    await produce(stack.kafka, topics.requests, [request(name, f"{GOOD} {name}") for name in names])
    consumer = make_consumer(topics).start()
    await asyncio.to_thread(wait_until, lambda: "twodoor_rows_total" in str(consumer.metrics()), "first result", 60)
    await asyncio.to_thread(stack.stop_service, "kafka")
    await asyncio.to_thread(wait_until, lambda: consumer.ready()["kafka"] == "down", "kafka seen down", 30)
    assert consumer.healthy()
    await asyncio.to_thread(stack.start_service, "kafka")
    assert_each_once(await results(stack.kafka, topics, len(names), 90), names)
    await asyncio.to_thread(wait_until, lambda: consumer.ready()["kafka"] == "up", "kafka seen up", 30)
    assert await asyncio.to_thread(consumer.stop) == 0


@pytest.mark.timeout(120)
async def test_a_consumer_that_starts_before_kafka_waits_for_it_and_says_so_once(
    stack: Stack, make_consumer: Any
) -> None:
    topics = await make_topics(stack.kafka)
    await asyncio.to_thread(stack.stop_service, "kafka")
    consumer = make_consumer(topics).start()
    await asyncio.to_thread(wait_until, lambda: "kafka away" in consumer.log(), "kafka away is said", 30)
    assert consumer.ready()["kafka"] == "down"
    assert consumer.healthy()
    await asyncio.sleep(2)
    assert consumer.log().count("kafka away") == 1
    assert len(consumer.log().splitlines()) < 40
    await asyncio.to_thread(stack.start_service, "kafka")
    await produce(stack.kafka, topics.requests, [request("late", GOOD)])
    assert_each_once(await results(stack.kafka, topics, 1), ["late"])


async def test_a_failing_row_among_many_gets_its_error_and_all_others_their_answer(
    stack: Stack, make_consumer: Any
) -> None:
    topics = await make_topics(stack.kafka)
    words = {"f7": FAIL, "f40": FAIL, "f41": NAN, "f90": FAIL}
    names = [f"f{index}" for index in range(120)]
    await produce(stack.kafka, topics.requests, [request(name, f"{GOOD} {words.get(name, name)}") for name in names])
    consumer = make_consumer(topics).start()
    found = {result["id"]: result for result in await results(stack.kafka, topics, len(names))}
    assert_each_once(list(found.values()), names)
    codes = {name: found[name]["error"]["code"] for name in words}
    assert codes == {"f7": "model_failed", "f40": "model_failed", "f41": "non_finite_output", "f90": "model_failed"}
    for name in set(names) - words.keys():
        assert found[name]["output"]["score"] == pytest.approx(stub_score(f"{GOOD} {name}"), abs=1e-6)
    assert consumer.healthy()


async def test_a_row_that_never_gets_its_answer_in_time_is_that_row_s_error(stack: Stack, make_consumer: Any) -> None:
    topics = await make_topics(stack.kafka)
    names = [f"l{index}" for index in range(12)]
    texts = {name: f"{GOOD} {name}" for name in names} | {"l5": f"{GOOD} {SLEEP}"}
    await produce(stack.kafka, topics.requests, [request(name, texts[name]) for name in names])
    make_consumer(topics, TWODOOR_CONSUMER_MODEL_TIMEOUT_S=1).start()
    found = {result["id"]: result for result in await results(stack.kafka, topics, len(names), 90)}
    assert found.pop("l5")["error"]["code"] == "model_failed"
    assert all("output" in result for result in found.values())


@pytest.mark.timeout(120)
async def test_records_of_a_model_that_is_loading_wait_in_a_bounded_window_and_other_models_go_on(
    kafka: str, triton: Triton, consumer_factory: Any
) -> None:
    topics = await make_topics(kafka)
    triton.unload(f"{STUB}_bulk")
    triton.unload(STUB)
    try:
        consumer = consumer_factory(
            topics,
            TWODOOR_CONSUMER_WINDOW_RECORDS=20,
            TWODOOR_CONSUMER_STALL_TIMEOUT_S=2,
            TWODOOR_CONSUMER_MAX_POLL_INTERVAL_MS=2_000,
        ).start()
        waiting = [ToSend(request(f"w{index}", GOOD), partition=0) for index in range(100)]
        passing = [ToSend(request(f"p{index}", GOOD, model="sentiment_model"), partition=1) for index in range(100)]
        await produce(kafka, topics.requests, [*waiting, *passing])
        assert_each_once(await results(kafka, topics, 100), [f"p{index}" for index in range(100)])
        backlog = f'twodoor_bulk_backlog_rows{{model="{STUB}"}}'
        wait_until(lambda: consumer.count(backlog) == 20, "the window is full")
        await asyncio.sleep(3)  # longer than the stall timeout and the poll interval
        assert consumer.count(backlog) == 20
        assert consumer.healthy()
        assert consumer.log().count("partitions assigned") == 1
    finally:
        triton.load(STUB)
        triton.load(f"{STUB}_bulk")
    ids = [f"{kind}{index}" for kind in "wp" for index in range(100)]
    assert_each_once(await results(kafka, topics, 200), ids)


async def test_a_model_that_serves_both_lanes_answers_bulk_work_in_micro_batches_kept_short(
    stack: Stack, make_consumer: Any
) -> None:
    topics = await make_topics(stack.kafka)
    names = [f"b{index}" for index in range(60)]
    # On any machine one row alone takes longer than this, so every row has to go by itself.
    consumer = make_consumer(topics, TWODOOR_CONSUMER_BULK_BATCH_MS=0.01).start()
    before = requests_seen(stack, BOTH_LANES)
    await produce(stack.kafka, topics.requests, [request(name, f"{GOOD} {name}", model=BOTH_LANES) for name in names])
    found = await results(stack.kafka, topics, len(names))
    assert_each_once(found, names)
    for result in found:
        assert result["output"]["score"] == pytest.approx(stub_score(f"{GOOD} {result['id']}"), abs=1e-6)
    assert consumer.log().count("cost of micro-batches measured") == 1
    assert requests_seen(stack, BOTH_LANES) - before >= len(names)


async def test_two_consumers_that_find_the_queue_full_wait_their_turn_and_no_row_gets_an_error(
    stack: Stack, make_consumer: Any
) -> None:
    topics = await make_topics(stack.kafka)
    names = [f"q{index}" for index in range(600)]
    # Each may have more requests under way than Triton's queue holds (64), of one row each.
    greedy = {"TWODOOR_CONSUMER_MAX_IN_FLIGHT": 100, "TWODOOR_CONSUMER_MAX_MICROBATCH_ROWS": 1}
    consumers = [make_consumer(topics, **greedy).launch() for _ in range(2)]
    both = '"partitions assigned"'
    await asyncio.to_thread(
        wait_until, lambda: all(consumer.log().count(both) for consumer in consumers), "both are in the group", 60
    )
    await produce(stack.kafka, topics.requests, [request(name, f"{GOOD} {name}") for name in names])
    found = await results(stack.kafka, topics, len(names), 90)
    assert_each_once(found, names)
    assert all("output" in result for result in found)
    counts = [c.count('twodoor_rows_total{lane="bulk",model="stub_faulty",outcome="ok"}') for c in consumers]
    assert sorted(counts) == [200, 400]
    assert sum(c.count('twodoor_retries_total{reason="overloaded"}') for c in consumers) > 0


def requests_seen(stack: Stack, model: str) -> int:
    """Return how many requests Triton has answered for a model."""
    port = stack.environment["TWODOOR_STACK_TRITON_HTTP_PORT"]
    stats = httpx.get(f"http://127.0.0.1:{port}/v2/models/{model}/stats", timeout=5).json()["model_stats"]
    return int(stats[0]["inference_stats"]["success"]["count"])
