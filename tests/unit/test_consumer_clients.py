"""How the consumer's own Kafka clients, the admin client and the producer, behave when something else goes wrong."""

import asyncio
import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaConnectionError, ProducerClosed, ProducerFenced

from batch_consumer import broker as broker_module
from batch_consumer import producers
from batch_consumer.broker import Broker
from batch_consumer.transactions import Outgoing, PartitionProducer
from serving.errors import DependencyDown
from serving.settings import ConsumerSettings, KafkaSettings, load

TP = TopicPartition("twodoor.requests", 0)


class FakeAdmin:
    """An admin client whose calls fail, or wait, as told."""

    made: list["FakeAdmin"]

    def __init__(self, **_: Any) -> None:
        self.is_closed = False
        self._client = SimpleNamespace(bootstrap=self.start)
        self.may_start = asyncio.Event()
        self.may_fail = asyncio.Event()
        self.calls = 0
        FakeAdmin.made.append(self)

    async def start(self) -> None:
        await self.may_start.wait()

    async def list_topics(self) -> None:
        self.calls += 1
        if self is FakeAdmin.made[0]:
            if self.calls == 1:
                await _until(lambda: self.calls == 2)
            else:
                await self.may_fail.wait()
            raise KafkaConnectionError("away")

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "SENDER_END_S", 0.05)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    FakeAdmin.made = []
    monkeypatch.setattr(broker_module, "AIOKafkaAdminClient", FakeAdmin)
    return Broker(load(KafkaSettings), load(ConsumerSettings))


async def test_a_question_that_fails_late_does_not_take_away_the_client_made_since(broker: Broker) -> None:
    first = asyncio.create_task(broker.ping())
    await _until(lambda: bool(FakeAdmin.made))
    late = asyncio.create_task(broker.ping())
    FakeAdmin.made[0].may_start.set()
    with contextlib.suppress(DependencyDown):
        await first
    # The second question still waits on the first client while a third one makes another.
    third = asyncio.create_task(broker.ping())
    await _until(lambda: len(FakeAdmin.made) == 2)
    FakeAdmin.made[0].may_fail.set()
    with pytest.raises(DependencyDown):
        await late
    FakeAdmin.made[1].may_start.set()
    await asyncio.wait_for(third, 5)
    assert not FakeAdmin.made[1].is_closed
    await broker.close()
    assert all(admin.is_closed for admin in FakeAdmin.made)


async def test_a_question_cut_short_while_the_client_starts_leaves_no_half_started_one(broker: Broker) -> None:
    asking = asyncio.create_task(broker.ping())
    await _until(lambda: bool(FakeAdmin.made))
    asking.cancel()
    await asyncio.wait([asking])
    assert FakeAdmin.made[0].is_closed
    again = asyncio.create_task(broker.ping())
    await _until(lambda: len(FakeAdmin.made) == 2)
    FakeAdmin.made[1].may_start.set()
    await asyncio.wait_for(again, 5)
    await broker.close()


def outgoing(size_bytes: int) -> Outgoing:
    return Outgoing("r", 0, b"k", b"x" * size_bytes, ())


async def test_a_batch_is_never_larger_than_the_topic_takes() -> None:
    producer = PartitionProducer(load(KafkaSettings), load(ConsumerSettings), TP, 20_000)
    try:
        batches = producer._batches([outgoing(3_000) for _ in range(50)])
        assert sum(batch.record_count() for _, batch in batches) == 50
        assert max(batch.size() for _, batch in batches) <= 20_000
    finally:
        await producer.close()


class HangingProducer:
    """aiokafka's producer with the broker away: what was sent is never delivered, and the next send does not return."""

    def __init__(self) -> None:
        self.sent: list[asyncio.Future[None]] = []
        self._message_accumulator = SimpleNamespace(_pending_batches=[], _batches={})
        self._txn_manager = SimpleNamespace(
            wait_for_transaction_end=asyncio.get_running_loop().create_future, _pending_txn_offsets=[]
        )

    async def begin_transaction(self) -> None: ...

    def create_batch(self) -> Any:
        return SimpleNamespace(append=lambda **_: object(), close=lambda: None)

    async def send_batch(self, *_: Any, **__: Any) -> Any:
        if self.sent:
            await asyncio.Event().wait()
        self.sent.append(asyncio.get_running_loop().create_future())
        return self.sent[-1]


async def test_a_transaction_ends_at_its_deadline_also_where_nothing_is_ever_delivered() -> None:
    settings: dict[str, Any] = {"kafka_timeout_s": 0.05}
    producer = PartitionProducer(load(KafkaSettings), ConsumerSettings(**settings), TP, 20_000)
    await producer.close()
    producer._producer = HangingProducer()
    other = Outgoing("r", 1, None, b"x", ())
    async with asyncio.timeout(5):
        with pytest.raises(TimeoutError):
            await producer.commit([outgoing(1), other], 1, "")


async def test_a_producer_that_is_closed_before_it_could_deliver_leaves_nothing_running_and_no_error_unread() -> None:
    producer = AIOKafkaProducer(enable_idempotence=True)
    unread: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    before = asyncio.all_tasks()

    async def send_for_ever() -> None:
        # As aiokafka's sender does: told to end, it first waits for the request under way.
        request = asyncio.create_task(asyncio.Event().wait())
        try:
            await asyncio.wait([request])
        except asyncio.CancelledError:
            await request

    producer._sender._sender_task = asyncio.create_task(send_for_ever())
    batch = producer.create_batch()
    batch.append(key=None, value=b"x", timestamp=None)
    delivery = await producer._message_accumulator.add_batch(batch, TopicPartition("t", 0), 1.0)
    await producers.end(producer, 0.05)
    with pytest.raises(ProducerClosed):
        await delivery
    del batch, delivery, producer
    await asyncio.sleep(0)
    gc.collect()
    assert asyncio.all_tasks() == before
    assert unread == []


async def test_offsets_that_were_not_waited_for_leave_no_error_unread_when_the_producer_is_fenced_later() -> None:
    settings: dict[str, Any] = {"kafka_timeout_s": 0.05}
    unread: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    producer = PartitionProducer(load(KafkaSettings), ConsumerSettings(**settings), TP, 20_000)
    manager = producer._producer._txn_manager
    manager.set_pid_and_epoch(1, 1)
    with pytest.raises(TimeoutError):
        await producer.commit([], 1, "")
    assert manager._pending_txn_offsets
    manager.fatal_error(ProducerFenced())
    await producer.close()
    del producer, manager
    await asyncio.sleep(0)
    gc.collect()
    assert unread == []


async def test_a_client_cut_short_in_its_first_exchange_closes_its_connection() -> None:
    asked: list[int] = []
    unread: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))

    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer which versions there are, and nothing else."""
        writers.append(writer)
        while size := await reader.read(4):
            request = await reader.readexactly(int.from_bytes(size))
            asked.append(int.from_bytes(request[:2]))
            if asked[-1] == 18:
                found = request[4:8] + bytes(2) + (1).to_bytes(4) + b"\0\3\0\0\0\1"
                writer.write(len(found).to_bytes(4) + found)
        writer.close()

    settings: dict[str, Any] = {"kafka_timeout_s": 0.1}
    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        kafka: dict[str, Any] = {"bootstrap_servers": address}
        producer = PartitionProducer(KafkaSettings(**kafka), ConsumerSettings(**settings), TP, 20_000)
        starting = asyncio.create_task(producer.start())
        await _until(lambda: asked == [18, 3])
        starting.cancel()
        await asyncio.wait([starting])
        del producer, starting
        gc.collect()
        assert unread == []
        # The server's own ends: what is left open would be a warning in whichever test comes later.
        async with asyncio.timeout(5):
            for writer in writers:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def _until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)
