"""`produce`, `consume` and `dlq` as a user types them, against a real Kafka."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from local_stack import Stack
from serving.v1.bulk_pb2 import BulkRequest
from tests.parts import ROOT, wait_until


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("cli-kafka")
    libs = os.environ.get("TWODOOR_STACK_KAFKA_LIBS", str(ROOT / ".kafka" / "libs"))
    with Stack(home, ("kafka",), environment={"TWODOOR_STACK_KAFKA_LIBS": libs}) as stack:
        yield stack


@pytest.fixture
def topics(kafka: Stack, request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment with topics of the test's own."""
    base = f"t{abs(hash(request.node.nodeid)) % 10**9}"
    names = [f"{base}.{part}" for part in ("requests", "results", "dlq")]

    async def create() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka.kafka)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(name, 3, 1) for name in names])
            # The controller has them now; the broker, which is asked next, hears of it a moment later.
            async with asyncio.timeout(20):
                while not all(is_open(topic) for topic in await admin.describe_topics(names)):
                    await asyncio.sleep(0.05)
        finally:
            await admin.close()

    asyncio.run(create())
    keys = ("TWODOOR_KAFKA_REQUESTS_TOPIC", "TWODOOR_KAFKA_RESULTS_TOPIC", "TWODOOR_KAFKA_DLQ_TOPIC")
    return {**dict(zip(keys, names, strict=True)), "TWODOOR_KAFKA_BOOTSTRAP_SERVERS": kafka.kafka,
           "TWODOOR_CONSUMER_GROUP_ID": base}  # fmt: skip


def is_open(topic: dict[str, Any]) -> bool:
    """Whether every partition of a described topic has its leader."""
    return topic["error_code"] == 0 and [part["leader"] >= 0 for part in topic["partitions"]] == [True] * 3


def command(env: dict[str, str], *arguments: str) -> tuple[list[str], dict[str, Any]]:
    return [sys.executable, "-m", "twodoor", *arguments], {"env": {**os.environ, **env}, "cwd": ROOT}


def twodoor(env: dict[str, str], *arguments: str, stdin: bytes | None = None) -> "subprocess.CompletedProcess[bytes]":
    line, options = command(env, *arguments)
    return subprocess.run(line, input=stdin, capture_output=True, timeout=60, check=False, **options)


def read_all(env: dict[str, str], topic: str, count: int) -> list[Any]:
    """Read a topic with a plain read_committed consumer until ``count`` records came and nothing follows."""

    async def read() -> list[Any]:
        consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=env["TWODOOR_KAFKA_BOOTSTRAP_SERVERS"], auto_offset_reset="earliest",
            isolation_level="read_committed",
        )  # fmt: skip
        records: list[Any] = []
        async with consumer:
            while batch := await consumer.getmany(timeout_ms=5_000 if len(records) < count else 500):
                records += [record for part in batch.values() for record in part]
        return records

    return asyncio.run(read())


def put(
    env: dict[str, str], topic: str, records: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]]
) -> None:
    async def send() -> None:
        async with AIOKafkaProducer(bootstrap_servers=env["TWODOOR_KAFKA_BOOTSTRAP_SERVERS"]) as producer:
            for number, (key, value, headers) in enumerate(records):
                await producer.send_and_wait(topic, value, key=key, headers=headers, partition=number % 3)

    asyncio.run(send())


def requests_topic(env: dict[str, str]) -> str:
    return env["TWODOOR_KAFKA_REQUESTS_TOPIC"]


def test_a_file_reaches_the_topic_and_bad_lines_are_named(topics: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf"first"\r\n\r\n{"id": "b", "inputs": ["x", "y"], "model": "other"}\n[1]\n"last"')
    done = twodoor(topics, "produce", str(file), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"topic": requests_topic(topics), "records": 3, "bad_lines": 1}
    assert done.stderr.decode().splitlines() == ["twodoor: line 4: neither a JSON string nor an object"]
    records = read_all(topics, requests_topic(topics), 3)
    assert {(record.key, record.value) for record in records} == {
        (None, b'{"model": "sentiment_model", "text": "first"}'),
        (b"b", b'{"model": "other", "id": "b", "inputs": ["x", "y"]}'),
        (None, b'{"model": "sentiment_model", "text": "last"}'),
    }


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_stdin_as_protobuf_in_every_codec(topics: dict[str, str], codec: str) -> None:
    lines = b"".join(json.dumps({"id": str(i), "text": f"row {i}"}).encode() + b"\n" for i in range(3_000))
    options = ("--content-type", "protobuf", "--compression", codec)
    done = twodoor(topics, "produce", "-", *options, stdin=lines)
    assert (done.returncode, done.stderr) == (0, b"")
    messages = [BulkRequest.FromString(record.value) for record in read_all(topics, requests_topic(topics), 3_000)]
    assert sorted(int(message.id) for message in messages) == list(range(3_000))


def test_a_line_larger_than_a_record_is_named_and_the_rest_arrives(topics: dict[str, str]) -> None:
    # The second is small enough as a line and too large as a record: the broker itself refuses it.
    lines = b'"%s"\n"%s"\n"ok"\n' % (b"x" * 2_000_000, b"y" * 1_048_570)
    done = twodoor(topics, "produce", "-", "--compression", "none", stdin=lines)
    assert done.returncode == 1
    errors = done.stderr.decode().splitlines()
    assert [error.split(":")[1].strip() for error in sorted(errors)] == ["line 1", "line 2"]
    assert len(read_all(topics, requests_topic(topics), 1)) == 1


def test_raw_sends_the_bytes_as_they_are(topics: dict[str, str]) -> None:
    done = twodoor(topics, "produce", "-", "--raw", stdin=b'{"broken\n\xff\xfe\n')
    assert done.returncode == 0
    assert {record.value for record in read_all(topics, requests_topic(topics), 2)} == {b'{"broken', b"\xff\xfe"}


def test_a_topic_that_does_not_exist_is_said_at_once(topics: dict[str, str]) -> None:
    for arguments in (["produce", "-", "--topic", "no.such"], ["consume", "--topic", "no.such"]):
        done = twodoor(topics, *arguments, stdin=b'"x"\n')
        assert done.returncode == 1
        assert done.stderr == b"twodoor: Kafka has no topic no.such\n"


def test_a_broker_that_stops_answering_ends_produce_within_its_bound(topics: dict[str, str], kafka: Stack) -> None:
    line, options = command(topics, "produce", "-", "--timeout-s", "2")
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(b'"before"\n')
        child.stdin.flush()
        wait_until(lambda: bool(read_all(topics, requests_topic(topics), 1)), "the first record arrives")
        broker = kafka.pid("kafka")
        os.kill(broker, signal.SIGSTOP)
        try:
            child.stdin.write(b'"during"\n')
            child.stdin.close()
            began = time.monotonic()
            assert child.wait(30) == 3
            assert time.monotonic() - began < 15
        finally:
            os.kill(broker, signal.SIGCONT)
        assert b"1 records are certain, 1 may or may not arrive" in child.stderr.read()


def test_consume_prints_what_is_committed_and_ends_at_max(topics: dict[str, str]) -> None:
    results = [{"id": str(i), "model": "m", "output": {"label": "positive", "score": 0.9}} for i in range(5)]
    put(topics, topics["TWODOOR_KAFKA_RESULTS_TOPIC"], [(None, json.dumps(row).encode(), []) for row in results])
    done = twodoor(topics, "consume", "--from-beginning", "--max", "5", "--timeout-s", "20", "--json")
    assert done.returncode == 0
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(shown, key=lambda row: str(row["id"])) == results
    fewer = twodoor(topics, "consume", "--from-beginning", "--max", "6", "--timeout-s", "1")
    assert fewer.returncode == 1
    assert b"5 of 6 records came" in fewer.stderr


def test_consume_from_the_end_sees_only_what_comes_and_not_what_was_aborted(topics: dict[str, str]) -> None:
    topic = topics["TWODOOR_KAFKA_RESULTS_TOPIC"]
    put(topics, topic, [(None, b'{"id": "old"}', [])])
    line, options = command(topics, "consume", "--max", "1", "--timeout-s", "20", "--json")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as child:
        assert child.stderr is not None
        assert child.stdout is not None
        assert b"from its end" in child.stderr.readline()

        async def abort_then_send() -> None:
            servers = topics["TWODOOR_KAFKA_BOOTSTRAP_SERVERS"]
            async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{topic}.test") as producer:
                await producer.begin_transaction()
                await producer.send_and_wait(topic, b'{"id": "aborted"}')
                await producer.abort_transaction()
                async with producer.transaction():
                    await producer.send_and_wait(topic, b'{"id": "new"}')

        asyncio.run(abort_then_send())
        assert child.wait(30) == 0
        assert json.loads(child.stdout.read()) == {"id": "new"}


def test_consume_ends_quietly_on_ctrl_c(topics: dict[str, str]) -> None:
    line, options = command(topics, "consume")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as child:
        assert child.stderr is not None
        assert b"from its end" in child.stderr.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 0
        assert child.stderr.read() == b""


LETTERS: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]] = [
    (
        f"k{i}".encode() if i % 2 else None,
        b'{"broken %d' % i,
        [
            ("mine", b"kept"),
            ("twodoor-error-code", b"invalid_json"),
            ("twodoor-error-message", b"not JSON \x1b[31m"),
            ("twodoor-source-topic", b"t"),
            ("twodoor-source-partition", b"0"),
            ("twodoor-source-offset", str(i).encode()),
        ],
    )
    for i in range(7)
]


def test_dead_letters_are_listed_with_their_reason(topics: dict[str, str]) -> None:
    put(topics, topics["TWODOOR_KAFKA_DLQ_TOPIC"], LETTERS)
    done = twodoor(topics, "dlq", "list", "--json")
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["code"], row["source"]) for row in shown} == {("invalid_json", f"t-0-{i}") for i in range(7)}
    text = twodoor(topics, "dlq", "list").stdout
    assert b"7 dead letters" in text
    assert b"\x1b" not in text


def test_a_dead_letter_goes_back_once_as_it_came(topics: dict[str, str]) -> None:
    put(topics, topics["TWODOOR_KAFKA_DLQ_TOPIC"], LETTERS)
    counts = [
        json.loads(twodoor(topics, "dlq", "replay", "--json", *more).stdout)["records"]
        for more in (["--max", "2"], [], [])
    ]
    assert counts == [2, 5, 0]
    records = read_all(topics, requests_topic(topics), 7)
    assert sorted((record.key or b"", record.value) for record in records) == sorted(
        (key or b"", value) for key, value, _ in LETTERS
    )
    assert {record.headers for record in records} == {(("mine", b"kept"),)}
    assert b"0 dead letters" in twodoor(topics, "dlq", "list").stdout
    assert b"7 dead letters" in twodoor(topics, "dlq", "list", "--all").stdout


def test_replays_at_the_same_time_and_killed_ones_send_each_letter_once(topics: dict[str, str]) -> None:
    put(topics, topics["TWODOOR_KAFKA_DLQ_TOPIC"], LETTERS)
    line, options = command(topics, "dlq", "replay")
    children = [subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options) for _ in range(3)]
    # Where in its work this kill falls is left to chance; the count below holds for any moment.
    children[0].kill()
    for child in children:
        _, stderr = child.communicate(timeout=60)
        assert child.returncode in (0, -signal.SIGKILL) or b"another replay" in stderr, stderr
    assert twodoor(topics, "dlq", "replay").returncode == 0
    values = sorted(record.value for record in read_all(topics, requests_topic(topics), 7))
    assert values == sorted(value for _, value, _ in LETTERS if value is not None)


def test_a_replay_ends_at_the_letters_that_were_there_when_it_began(topics: dict[str, str]) -> None:
    """Its own offsets' transaction marker, and an open transaction of somebody else, are no reason to wait."""
    topic = topics["TWODOOR_KAFKA_DLQ_TOPIC"]
    put(topics, topic, LETTERS)

    async def with_an_open_transaction() -> None:
        servers = topics["TWODOOR_KAFKA_BOOTSTRAP_SERVERS"]
        async with AIOKafkaProducer(bootstrap_servers=servers, transactional_id=f"{topic}.open") as producer:
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"later", partition=0)
            done = await asyncio.to_thread(twodoor, topics, "dlq", "replay", "--json")
            assert json.loads(done.stdout)["records"] == 7
            await producer.commit_transaction()

    asyncio.run(with_an_open_transaction())
    assert json.loads(twodoor(topics, "dlq", "replay", "--json").stdout)["records"] == 1
