"""Offsets that no longer exist, records larger than a fetch, markers at the end: nothing is passed over silently."""

import asyncio
import json
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.integration.conftest import ConsumerFactory
from tests.integration.consumer_parts import (
    PARTITIONS,
    Consumer,
    Topics,
    ToSend,
    assert_each_once,
    create,
    make_topics,
    produce,
    read,
    request,
    results,
)
from tests.parts import wait_until

LOST = "twodoor_offsets_lost_total"


async def _commit(kafka: str, topics: Topics, offset: int) -> None:
    """Commit an offset for partition 0 as somebody else of the group would."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, group_id=topics.group, enable_auto_commit=False)
    await consumer.start()
    try:
        partition = TopicPartition(topics.requests, 0)
        consumer.assign([partition])
        await consumer.commit({partition: offset})
    finally:
        await consumer.stop()


async def _committed(kafka: str, topics: Topics) -> int:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        partition = TopicPartition(topics.requests, 0)
        offset: int = (await admin.list_consumer_group_offsets(topics.group, partitions=[partition]))[partition].offset
        return offset
    finally:
        await admin.close()


async def _admin(kafka: str, work: Any) -> Any:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    try:
        return await work(admin)
    finally:
        await admin.close()


def _five(prefix: str) -> list[ToSend | bytes]:
    return [ToSend(request(f"{prefix}{index}"), partition=0) for index in range(5)]


async def test_an_offset_behind_the_end_is_told_once_and_all_records_are_done(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    await produce(kafka, topics.requests, _five("b"))
    await _commit(kafka, topics, 10**9)
    consumer = consumer_factory(topics).start()
    assert_each_once(await results(kafka, topics, 5), [f"b{index}" for index in range(5)])
    assert consumer.count(LOST) == 1
    warnings = [line for line in consumer.log().splitlines() if '"offsets lost"' in line]
    assert len(warnings) == 1
    assert json.loads(warnings[0])["gap"] == 10**9 - 5
    assert await asyncio.to_thread(consumer.stop) == 0
    assert await _committed(kafka, topics) == 5


async def test_records_deleted_before_they_were_read_are_told_with_the_gap_and_the_rest_is_done(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    await produce(kafka, topics.requests, [ToSend(request(f"c{index}"), partition=0) for index in range(20)])
    await _commit(kafka, topics, 3)
    partition = TopicPartition(topics.requests, 0)
    await _admin(kafka, lambda admin: admin.delete_records({partition: RecordsToDelete(before_offset=10)}))
    consumer = consumer_factory(topics).start()
    assert_each_once(await results(kafka, topics, 10), [f"c{index}" for index in range(10, 20)])
    assert consumer.count(LOST) == 1
    (warning,) = [line for line in consumer.log().splitlines() if '"offsets lost"' in line]
    assert json.loads(warning)["gap"] == 7


@pytest.mark.timeout(150)
async def test_a_topic_that_is_deleted_and_made_anew_under_a_running_consumer_is_read_from_its_beginning(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    await produce(kafka, topics.requests, [ToSend(request(f"a{index}"), partition=0) for index in range(100)])
    consumer = consumer_factory(topics).start()
    await results(kafka, topics, 100)
    await _admin(kafka, lambda admin: admin.delete_topics([topics.requests]))
    await asyncio.sleep(1)
    await create(kafka, topics.requests, {})
    await produce(kafka, topics.requests, _five("new"))
    found = await results(kafka, topics, 105, 90)
    assert [r["id"] for r in found if r["id"].startswith("new")] == [f"new{index}" for index in range(5)]
    assert len(found) == 105
    assert consumer.count(LOST) >= 1
    assert '"offsets lost"' in consumer.log()
    assert consumer.child.poll() is None


async def test_a_consumer_refuses_to_start_where_a_record_may_be_larger_than_a_fetch(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    consumer = consumer_factory(topics, TWODOOR_CONSUMER_MAX_PARTITION_FETCH_BYTES=50_000).launch()
    assert await asyncio.to_thread(consumer.child.wait, 30) == 2
    assert "TWODOOR_CONSUMER_MAX_PARTITION_FETCH_BYTES" in consumer.log()
    assert "Traceback" not in consumer.log()


async def test_records_larger_than_the_fetch_size_are_done_when_the_limit_is_raised_under_a_running_consumer(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka, {"max.message.bytes": "50000"})
    consumer = consumer_factory(topics, TWODOOR_CONSUMER_MAX_PARTITION_FETCH_BYTES=50_000).start()
    await asyncio.to_thread(wait_until, lambda: "partition open" in consumer.log(), "open", 30)
    resource = ConfigResource(ConfigResourceType.TOPIC, topics.requests, {"max.message.bytes": "1048576"})
    await _admin(kafka, lambda admin: admin.alter_configs([resource]))
    large = request("large", "word " * 40_000, truncate=True)
    small: list[ToSend | bytes] = [request(f"s{index}") for index in range(PARTITIONS * 4)]
    await produce(kafka, topics.requests, [ToSend(large, partition=1), *small])
    ids = ["large", *(f"s{index}" for index in range(PARTITIONS * 4))]
    assert_each_once(await results(kafka, topics, len(ids)), ids)
    told = "twodoor_fetch_size_too_small"
    await asyncio.to_thread(wait_until, lambda: consumer.count(told) == 1, "the metric tells", 30)


async def test_a_transaction_marker_at_the_end_is_no_lag_and_no_stall_and_aborted_records_give_no_result(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    consumer = consumer_factory(topics, TWODOOR_CONSUMER_STALL_TIMEOUT_S=1).start()
    producer = AIOKafkaProducer(bootstrap_servers=kafka, transactional_id=topics.group + "-user")
    await producer.start()
    try:
        for name, commit in (("kept", True), ("dropped", False), ("last", True)):
            await producer.begin_transaction()
            await producer.send_and_wait(topics.requests, request(name), partition=0)
            await (producer.commit_transaction() if commit else producer.abort_transaction())
    finally:
        await producer.stop()
    assert_each_once(await results(kafka, topics, 2), ["kept", "last"])
    lag = f'twodoor_topic_lag_records{{topic="{topics.requests}"}}'
    await asyncio.to_thread(wait_until, lambda: consumer.metrics().get(lag) == 0, "no lag")
    for _ in range(20):
        assert consumer.healthy()
        assert consumer.count(lag) == 0
        await asyncio.sleep(0.1)


async def test_a_consumer_that_stands_still_with_lag_fails_its_health_and_one_that_waits_does_not(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    # SIGSTOP of the whole process would stop /healthz too, so the stall is one of the model: it never answers in time.
    consumer: Consumer = consumer_factory(
        topics, TWODOOR_CONSUMER_STALL_TIMEOUT_S=1, TWODOOR_CONSUMER_MAX_IN_FLIGHT=1
    ).start()
    await produce(kafka, topics.requests, [request(f"z{index}", "a lantern film") for index in range(3)])
    await asyncio.to_thread(wait_until, lambda: not consumer.healthy(), "stall told", 30, 0.1)
    assert "stalled" in consumer.log()
    assert_each_once(await results(kafka, topics, 3), [f"z{index}" for index in range(3)])
    await asyncio.to_thread(wait_until, consumer.healthy, "healthy again", 30)


async def test_results_are_read_by_somebody_who_reads_only_what_is_committed(
    kafka: str, consumer_factory: ConsumerFactory
) -> None:
    topics = await make_topics(kafka)
    await produce(kafka, topics.requests, _five("o"))
    consumer_factory(topics).start()
    messages = await read(kafka, topics.results, lambda found: len(found) >= 5)
    offsets = [json.loads(message.value)["source"]["offset"] for message in messages]
    assert offsets == [0, 1, 2, 3, 4]
