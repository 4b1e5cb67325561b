"""A consumer that is killed, stopped or joined by another at any moment: each record still gives exactly one result."""

import asyncio
import signal

import pytest

from serving.crashpoint import crashpoint
from tests.integration.conftest import ConsumerFactory
from tests.integration.consumer_parts import Topics, assert_each_once, make_topics, produce, request, results
from tests.parts import wait_until

RECORDS = 150
IDS = [f"r{index}" for index in range(RECORDS)]

# Each moment at another pass, so that some work is committed, some is on its way, and some is not yet begun.
CRASHPOINTS = [
    "on_assigned_before_seek:2", "after_fetch:2", "after_tokenize:1", "before_infer:3", "after_infer:3",
    "after_begin:2", "after_send:2", "after_offsets:2", "before_commit:3", "after_commit:2",
]  # fmt: skip
SMALL_STEPS = {
    "TWODOOR_CONSUMER_WINDOW_RECORDS": 24,
    "TWODOOR_CONSUMER_MAX_MICROBATCH_ROWS": 8,
    "TWODOOR_CONSUMER_TRANSACTION_RECORDS": 10,
    "TWODOOR_CONSUMER_COMMIT_INTERVAL_MS": 30,
}


async def _fill(kafka: str) -> Topics:
    topics = await make_topics(kafka)
    await produce(kafka, topics.requests, [request(name, f"a film with {name}") for name in IDS])
    return topics


async def _killed_at(kafka: str, consumer_factory: ConsumerFactory, moment: str) -> None:
    topics = await _fill(kafka)
    first = consumer_factory(topics, **SMALL_STEPS, TWODOOR_TEST_CRASHPOINT=moment).launch()
    code = await asyncio.to_thread(first.child.wait, 60)
    assert code == -signal.SIGKILL, f"{moment} was not reached:\n{first.log()}"
    second = consumer_factory(topics, **SMALL_STEPS).launch()
    assert_each_once(await results(kafka, topics, RECORDS), IDS)
    assert second.child.poll() is None
    assert await asyncio.to_thread(second.stop) == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("moments", [CRASHPOINTS[:5], CRASHPOINTS[5:]], ids=["while working", "while committing"])
async def test_a_kill_at_any_moment_leaves_each_record_with_one_result(
    kafka: str, consumer_factory: ConsumerFactory, moments: list[str]
) -> None:
    outcomes = await asyncio.gather(
        *(_killed_at(kafka, consumer_factory, moment) for moment in moments), return_exceptions=True
    )
    failed = {moment: str(o) for moment, o in zip(moments, outcomes, strict=True) if isinstance(o, BaseException)}
    assert failed == {}


@pytest.mark.timeout(180)
async def test_a_stopped_consumer_that_comes_back_in_the_middle_of_a_transaction_writes_nothing_twice(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    moments = ["after_send:2", "after_offsets:2", "before_commit:3"]

    async def one(moment: str) -> None:
        topics = await _fill(kafka)
        zombie = consumer_factory(topics, **SMALL_STEPS, TWODOOR_TEST_STOPPOINT=moment).launch()
        await asyncio.to_thread(wait_until, lambda: _is_stopped(zombie.child.pid), f"stopped at {moment}", 60)
        heir = consumer_factory(topics, **SMALL_STEPS).launch()
        assert_each_once(await results(kafka, topics, RECORDS), IDS)
        zombie.send(signal.SIGCONT)
        more = [f"{moment}-{index}" for index in range(60)]
        await produce(kafka, topics.requests, [request(name) for name in more])
        assert_each_once(await results(kafka, topics, RECORDS + len(more)), [*IDS, *more])
        # A rebalance may still run, and SIGTERM does not wait for its end.
        rejoined = f"the stopped consumer is in its group again ({moment})"
        await asyncio.to_thread(wait_until, lambda: zombie.log().count("partitions assigned") >= 2, rejoined, 60)
        assert zombie.child.poll() is None, zombie.log()
        assert await asyncio.to_thread(zombie.stop) == 0
        assert await asyncio.to_thread(heir.stop) == 0
        assert "Traceback" not in zombie.log()
        assert "background error" not in zombie.log()

    await asyncio.gather(*map(one, moments))


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.timeout(120)
async def test_a_second_consumer_that_joins_and_leaves_in_the_middle_changes_no_result(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    names = [f"j{index}" for index in range(1_500)]
    await produce(kafka, topics.requests, [request(name, f"a film with {name}") for name in names[:750]])
    first = consumer_factory(topics, **SMALL_STEPS).start()
    await asyncio.to_thread(wait_until, lambda: "twodoor_rows_total" in str(first.metrics()), "first result", 60)
    second = consumer_factory(topics, **SMALL_STEPS).start()
    await produce(kafka, topics.requests, [request(name, f"a film with {name}") for name in names[750:]])
    await asyncio.to_thread(wait_until, lambda: "partition open" in second.log(), "the second owns a partition", 60)
    assert await asyncio.to_thread(second.stop) == 0
    assert_each_once(await results(kafka, topics, len(names)), names)
    assert await asyncio.to_thread(first.stop) == 0


async def test_sigterm_commits_what_was_finished_and_leaves_the_group_within_its_time(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    names = [f"s{index}" for index in range(3_000)]
    await produce(kafka, topics.requests, [request(name) for name in names])
    first = consumer_factory(topics).start()
    await asyncio.to_thread(wait_until, lambda: "twodoor_rows_total" in str(first.metrics()), "first result", 60)
    assert await asyncio.to_thread(first.stop, 10) == 0
    answered = len(await results(kafka, topics, 1))
    assert answered > 0
    second = consumer_factory(topics).start()
    assert_each_once(await results(kafka, topics, len(names)), names)
    assert await asyncio.to_thread(second.stop) == 0


def test_a_moment_nobody_armed_does_nothing() -> None:
    crashpoint("before_commit")
