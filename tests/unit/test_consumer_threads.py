"""Work over 64 KB never runs on the event loop's thread: reading, tokenizing and writing of large records."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from batch_consumer import intake, owned
from batch_consumer.intake import take_in
from batch_consumer.owned import OwnedPartition
from batch_consumer.partition import Window
from batch_consumer.records import parse
from batch_consumer.results import outgoing
from serving.settings import ConsumerSettings, load
from tests.unit.test_consumer_topic import TP, FakeProducer, make_parts


def message(offset: int, text: str) -> Any:
    value = json.dumps({"id": str(offset), "model": "m", "text": text}).encode()
    return SimpleNamespace(topic="t", partition=0, offset=offset, key=None, headers=(), value=value)


@pytest.mark.parametrize(("chars", "on_the_loop"), [(100, True), (70_000, False)])
async def test_a_large_record_is_parsed_off_the_loop_and_a_small_one_on_it(
    monkeypatch: pytest.MonkeyPatch, chars: int, on_the_loop: bool
) -> None:
    threads: list[threading.Thread] = []

    def noting(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*args)

    monkeypatch.setattr(intake, "parse", noting)
    window = Window(0, {}, 10, 2**20)
    (row,) = await take_in(window, [message(0, "x" * chars)], load(ConsumerSettings))
    assert row.text == "x" * chars
    assert [thread is threading.main_thread() for thread in threads] == [on_the_loop]


async def test_many_small_records_that_are_much_together_are_parsed_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[threading.Thread] = set()

    def noting(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return parse(*args)

    monkeypatch.setattr(intake, "parse", noting)
    window = Window(0, {}, 10_000, 2**24)
    await take_in(window, [message(offset, "x" * 100) for offset in range(1_000)], load(ConsumerSettings))
    assert threading.main_thread() not in threads


async def test_results_are_written_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()

    def noting(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return outgoing(*args)

    monkeypatch.setattr(owned, "outgoing", noting)
    window = Window(0, {}, 10, 2**20)
    await take_in(window, [message(0, "x")], load(ConsumerSettings))
    producer: Any = FakeProducer([], [])
    await OwnedPartition(TP, None, make_parts())._transact(window, producer)
    assert threads
    assert threading.main_thread() not in threads


async def test_records_for_a_window_closed_while_they_were_parsed_give_no_rows() -> None:
    window = Window(0, {}, 10, 2**20)
    window.close()
    assert await take_in(window, [message(0, "x")], load(ConsumerSettings)) == []
    assert window.uncommitted == 0
