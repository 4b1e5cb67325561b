"""What cannot be provoked on a real broker: how the reader and the partition deal with errors of the Kafka client."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import (
    CorruptRecordException,
    KafkaError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceNumber,
    ProducerFenced,
    RecordTooLargeError,
)

from batch_consumer import group, owned
from batch_consumer.metrics import Metrics
from batch_consumer.owned import OwnedPartition, Parts
from batch_consumer.partition import Window
from batch_consumer.results import Target
from batch_consumer.session import Session
from batch_consumer.watchdog import Sight, Watchdog, watch
from serving.settings import ConsumerSettings, KafkaSettings, load

TP = TopicPartition("twodoor.requests", 0)
OTHER = TopicPartition("twodoor.requests", 1)


class FakeConsumer:
    """aiokafka's consumer as far as the session uses it."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.asked: list[tuple[TopicPartition, ...]] = []
        self.sought: list[tuple[TopicPartition, int]] = []
        self.error: Exception | None = None
        self.is_stopped = False
        self.ends = {TP: 0, OTHER: 0}
        self.positions = {TP: 0, OTHER: 0}
        self._client = SimpleNamespace(bootstrap=self.start)

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.is_stopped = True

    def subscribe(self, topics: list[str], listener: object) -> None:
        self.topics, self.listener = topics, listener

    def assignment(self) -> set[TopicPartition]:
        return {TP, OTHER}

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.sought.append((partition, offset))

    async def getmany(self, *partitions: TopicPartition, **_: object) -> dict[TopicPartition, list[Any]]:
        self.asked.append(partitions)
        if self.error is not None and partitions == (TP,):
            raise self.error
        return {}

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {partition: self.ends[partition] for partition in partitions}

    beginning_offsets = end_offsets

    async def position(self, partition: TopicPartition) -> int:
        return self.positions[partition]


class FakeLane:
    """A lane with nothing in it."""

    def drop_dead(self) -> None: ...

    def rows_in_flight(self) -> list[Any]:
        return []

    def submit(self, rows: object) -> None: ...


class FakeFacts:
    """Topics as they should be."""

    results = Target("r", 1, 1000)
    dead_letters = Target("d", 1, 1000)

    async def refresh(self) -> None: ...


class FakeBroker:
    """A group that has committed nothing."""

    async def committed(self, partition: TopicPartition) -> tuple[int | None, str]:
        return None, ""


def make_parts(**settings: Any) -> Parts:
    fakes: dict[str, Any] = {"broker": FakeBroker(), "facts": FakeFacts(), "lane": FakeLane()}
    return Parts(load(KafkaSettings), ConsumerSettings(**settings), metrics=Metrics(), known_models=frozenset, **fakes)


@pytest.fixture
def parts() -> Parts:
    return make_parts()


@pytest.fixture
def session(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(group, "AIOKafkaConsumer", FakeConsumer)
    made = Session(parts)
    for partition in (TP, OTHER):
        one = OwnedPartition(partition, made._consumer, parts)
        one.window = Window(40, {}, 10, 2**20)
        made._owned[partition] = (one, None)  # type: ignore[assignment]
    return made


def sample(parts: Parts, name: str, **labels: str) -> float:
    return parts.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_the_client_s_unsafe_defaults_are_all_overridden(session: Session) -> None:
    settings = session._consumer.settings
    assert settings["enable_auto_commit"] is False
    assert settings["auto_offset_reset"] == "none"
    assert settings["isolation_level"] == "read_committed"
    assert settings["max_poll_interval_ms"] == 300_000
    drain_ms = session._settings.drain_timeout_s * 1000
    assert settings["rebalance_timeout_ms"] > drain_ms
    assert settings["request_timeout_ms"] > settings["rebalance_timeout_ms"]
    assert settings["max_partition_fetch_bytes"] >= load(KafkaSettings).max_message_bytes


async def test_each_partition_is_read_by_a_call_of_its_own(session: Session) -> None:
    await session._visit_all()
    assert session._consumer.asked == [(TP,), (OTHER,)]


async def test_a_partition_without_room_is_not_read_and_the_others_are(session: Session) -> None:
    window = session._owned[TP][0].window
    assert window is not None
    window.stop()
    await session._visit_all()
    assert session._consumer.asked == [(OTHER,)]


async def test_a_record_larger_than_the_fetch_stops_its_partition_where_it_is_and_alerts(
    session: Session, parts: Parts
) -> None:
    session._consumer.error = RecordTooLargeError("too large")
    await session._visit_all()
    assert session._consumer.sought == [(TP, 40)]
    assert sample(parts, "twodoor_partitions_blocked", reason="record_too_large") == 1
    session._consumer.asked.clear()
    await session._visit_all()
    assert session._consumer.asked == [(OTHER,)]


async def test_an_offset_out_of_range_stops_reading_until_all_that_was_read_is_committed(session: Session) -> None:
    session._consumer.error = OffsetOutOfRangeError({TP: 40})
    await session._visit_all()
    assert session._consumer.sought == []
    assert session._owned[TP][0].room == 0
    assert session._owned[TP][0].window is not None


@pytest.mark.parametrize("error", [CorruptRecordException("crc"), KafkaError("codec")])
async def test_after_an_error_in_the_middle_of_a_fetch_reading_goes_back_to_what_was_not_given(
    session: Session, error: Exception
) -> None:
    session._consumer.error = error
    await session._visit_all()
    assert session._consumer.sought == [(TP, 40)]


async def test_a_record_that_breaks_the_client_s_decoder_stops_its_partition_and_no_other(
    session: Session, parts: Parts
) -> None:
    session._consumer.error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "header name")
    await session._visit_all()
    assert session._consumer.asked == [(TP,), (OTHER,)]
    assert session._consumer.sought == [(TP, 40)]
    assert sample(parts, "twodoor_partitions_blocked", reason="undecodable_record") == 1


async def test_partitions_that_come_while_the_session_ends_are_not_taken(session: Session) -> None:
    session._owned.clear()
    session._closing = True
    await session.on_partitions_assigned({TP})
    assert session._owned == {}


async def test_records_for_a_window_that_was_closed_meanwhile_are_read_again_by_the_next(session: Session) -> None:
    window = session._owned[TP][0].window
    assert window is not None

    async def getmany(*_: object, **__: object) -> dict[TopicPartition, list[Any]]:
        # A rebalance in the middle of the call: the old window closes, a new one is open before the records arrive.
        window.close()
        session._owned[TP][0].window = Window(25, {}, 10, 2**20)
        return {TP: [object()]}

    session._consumer.getmany = getmany
    found = await session._visit(TP, session._owned[TP][0])
    assert found == 0
    assert session._consumer.sought == [(TP, 25)]


async def test_lag_is_counted_from_what_was_read_so_that_a_marker_at_the_end_is_none(session: Session) -> None:
    session._consumer.ends = {TP: 50, OTHER: 41}
    session._consumer.positions = {TP: 50, OTHER: 40}
    assert await session.measure_lag() == 1
    session._consumer.positions = {TP: 50, OTHER: 41}
    assert await session.measure_lag() == 0


async def test_a_partition_that_does_not_open_while_kafka_answers_is_stuck(session: Session) -> None:
    never: Any = SimpleNamespace(is_open=False, blocked="")
    session._owned = {TP: (never, asyncio.get_running_loop().create_future())}
    session.look_at_closed(True)
    stuck = [session.is_stuck]
    session._closed_since_s[TP] -= session._settings.stall_timeout_s
    session.look_at_closed(True)
    stuck.append(session.is_stuck)
    session.look_at_closed(False)
    session.look_at_closed(True)
    stuck.append(session.is_stuck)
    assert stuck == [False, True, False]


async def test_a_client_that_gives_no_records_although_there_are_some_is_stuck(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session._consumer.ends = {TP: 50, OTHER: 40}
    session._consumer.positions = {TP: 40, OTHER: 40}
    await session.measure_lag()
    stuck = [session.is_stuck]
    session._read_at_s -= session._settings.stall_timeout_s
    stuck.append(session.is_stuck)
    session._consumer.positions = {TP: 50, OTHER: 40}
    await session.measure_lag()
    stuck.append(session.is_stuck)
    assert stuck == [False, True, False]


async def test_a_rebalance_that_does_not_end_is_a_stuck_client_although_it_shows_no_lag(session: Session) -> None:
    session._owned.clear()
    await session.on_partitions_revoked(set())
    assert session._rebalancing_since_s is not None
    stuck = [session.is_stuck]
    session._rebalancing_since_s -= session._join_limit_s + 1
    stuck.append(session.is_stuck)
    await session.on_partitions_assigned(set())
    stuck.append(session.is_stuck)
    assert stuck == [False, True, False]


async def test_the_watchdog_has_a_stuck_client_replaced() -> None:
    restarted = asyncio.Event()
    watchdog = Watchdog(60.0, 0.0)
    task = asyncio.create_task(
        watch(watchdog, lambda: Sight(0, 5, waits=False, reads_nothing=True), restarted.set, 0.01)
    )
    await asyncio.wait_for(restarted.wait(), 5)
    task.cancel()
    await asyncio.wait([task])


class FakeProducer:
    """A producer that fails as often as it is told, and remembers what was done to it."""

    def __init__(self, failures: list[Exception], done: list[str]) -> None:
        self._failures, self._done = failures, done

    async def start(self) -> None:
        self._done.append("start")

    async def commit(self, records: object, offset: int, metadata: str) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self._done.append(f"commit {offset}")

    async def close(self) -> None:
        self._done.append("close")


@pytest.mark.parametrize(
    "error", [OutOfOrderSequenceNumber("x"), ProducerFenced(), TimeoutError(), AssertionError("state")]
)
async def test_a_producer_that_fails_is_replaced_and_the_partition_looked_up_anew(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    done: list[str] = []
    failures = [error]
    monkeypatch.setattr(owned, "PartitionProducer", lambda *_: FakeProducer(failures, done))
    parts = make_parts(retry_backoff_max_s=0.01, session_timeout_ms=1_000)
    consumer = FakeConsumer()
    one = OwnedPartition(TP, consumer, parts)
    task = asyncio.create_task(one.run())
    await _until(lambda: one.window is not None)
    assert one.window is not None
    one.window.set_suspect((3, 0), 1)
    await _until(lambda: done.count("start") == 2 and one.window is not None)
    assert done[:3] == ["start", "close", "start"]
    assert consumer.sought == [(TP, 0), (TP, 0)]
    one.window.set_suspect((3, 0), 1)
    await _until(lambda: "commit 0" in done)
    await one.drain(task, asyncio.get_running_loop().time() + 1)
    assert done[-1] == "close"
    assert task.done()


@pytest.mark.parametrize("end", ["stop", "end"])
async def test_a_session_ends_also_while_a_call_of_the_client_does_not_return(session: Session, end: str) -> None:
    session._owned.clear()
    asked = asyncio.Event()

    async def getmany(*_: object, **__: object) -> dict[TopicPartition, list[Any]]:
        # As in a rebalance that does not come to its end: the client waits for it without a limit.
        asked.set()
        await asyncio.Event().wait()
        return {}

    session._consumer.getmany = getmany
    stop = asyncio.Event()
    running = asyncio.create_task(session.run(stop))
    await asyncio.wait_for(asked.wait(), 5)
    if end == "stop":
        stop.set()
    else:
        session.end()
    await asyncio.wait_for(running, 5)
    assert session._consumer.is_stopped


async def test_a_session_that_ends_in_the_middle_of_a_rebalance_waits_for_its_drain(session: Session) -> None:
    one: Any = session._owned[TP][0]
    session._owned.clear()
    drained, may_end = asyncio.Event(), asyncio.Event()

    async def drain(*_: object) -> None:
        await may_end.wait()
        drained.set()

    one.drain = drain
    session._owned[TP] = (one, None)  # type: ignore[assignment]
    rebalance = asyncio.create_task(session.on_partitions_revoked({TP}))
    await _until(lambda: not session._owned)
    session.end()
    ending = asyncio.create_task(session.run(asyncio.Event()))
    await asyncio.wait([ending], timeout=0.1)
    assert not session._consumer.is_stopped
    may_end.set()
    await asyncio.wait_for(asyncio.gather(rebalance, ending), 5)
    assert drained.is_set()
    assert session._consumer.is_stopped


async def test_a_drain_that_is_cut_short_leaves_no_task_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(owned, "PartitionProducer", lambda *_: FakeProducer([], done))
    one: Any = OwnedPartition(TP, FakeConsumer(), make_parts())
    one._has_rows_in_flight = lambda _: True
    task = asyncio.create_task(one.run())
    await _until(lambda: one.window is not None)
    drain = asyncio.create_task(one.drain(task, asyncio.get_running_loop().time() + 60))
    await _until(lambda: one.window is not None and not one.window.is_open)
    drain.cancel()
    await asyncio.wait([drain])
    assert task.done()
    assert done[-1] == "close"


async def test_a_partition_that_begins_again_and_again_makes_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(owned, "PartitionProducer", lambda *_: FakeProducer([], done))
    one = OwnedPartition(TP, FakeConsumer(), make_parts(retry_backoff_max_s=30))
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
            seconds = 0.001
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)
    task = asyncio.create_task(one.run())
    async with asyncio.timeout(5):
        while done.count("start") < 6:
            one.begin_again()
            await sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    assert len(pauses) >= 5
    assert pauses[4] > pauses[0]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)
