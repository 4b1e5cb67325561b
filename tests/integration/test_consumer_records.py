"""Records of the request topic against the real parts: each form, each kind of bad input, exactly one result each."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving.v1 import bulk_pb2
from tests.integration.conftest import ConsumerFactory
from tests.integration.consumer_parts import (
    PARTITIONS,
    Consumer,
    Topics,
    ToSend,
    assert_each_once,
    make_topics,
    produce,
    read,
    request,
)
from tests.observability import BY_PROMETHEUS, TARGET_LABELS, expressions, family
from tests.parts import Gateway, wait_until
from tests.stubs import FAIL, INF, NAN, STUB, stub_score

GOOD = "a gorgeous, witty, seductive movie"
PROTOBUF = [("content-type", b"application/x-protobuf")]
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def topics(kafka: str) -> Topics:
    return asyncio.run(make_topics(kafka))


@pytest.fixture(scope="module")
def consumer(kafka: str, triton: Any, topics: Topics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consumer]:
    """One consumer for all cases: what one record does must not harm the next."""
    folder = tmp_path_factory.mktemp("consumer")
    settings = {"TWODOOR_CONSUMER_MAX_ROWS_PER_RECORD": 400}
    made = Consumer(folder, kafka, triton.grpc_address, triton.repository, topics, **settings).start()
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def _still_works(consumer: Consumer) -> Iterator[None]:
    """After every case the process lives, is healthy, and has no traceback in its log."""
    yield
    assert consumer.child.poll() is None
    assert consumer.healthy()
    assert "Traceback" not in consumer.log()


async def _ask(kafka: str, topics: Topics, records: list[ToSend | bytes], names: set[str]) -> dict[str, dict[str, Any]]:
    """Send records and return their results by id, each checked to be the only one."""
    await produce(kafka, topics.requests, records)

    def complete(found: list[Any]) -> bool:
        return names <= {json.loads(m.value)["id"] for m in found if not _is_protobuf(m)}

    found = await read(kafka, topics.results, complete)
    values = [json.loads(message.value) for message in found if not _is_protobuf(message)]
    mine = [value for value in values if value["id"] in names]
    assert len(mine) == len(names)
    return {value["id"]: value for value in mine}


def _is_protobuf(message: Any) -> bool:
    return dict(message.headers).get("content-type") == b"application/x-protobuf"


async def test_a_record_gives_a_result_with_its_source_its_key_and_the_right_answer(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    await produce(kafka, topics.requests, [ToSend(request("one", GOOD), key=b"my key", partition=2)])
    found = await read(kafka, topics.results, lambda f: any(b'"one"' in m.value for m in f))
    (message,) = [m for m in found if b'"one"' in m.value]
    value = json.loads(message.value)
    assert (message.key, message.partition) == (b"my key", 2)
    assert value["model"] == STUB
    assert value["output"]["score"] == pytest.approx(stub_score(GOOD), abs=1e-6)
    assert value["output"]["sentiment"] == value["output"]["label"]
    assert value["source"]["topic"] == topics.requests
    assert value["source"]["partition"] == 2


async def test_inputs_give_predictions_in_order_with_each_row_s_own_error(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    texts = [GOOD, "", None, 5, "word " * 600, f"a {NAN} film", "fine", f"a {INF} film", "\ud800"]
    body = json.dumps({"id": "many", "model": STUB, "inputs": texts}).encode()
    found = await _ask(kafka, topics, [body], {"many"})
    rows = found["many"]["predictions"]
    assert [row.get("error", {}).get("code") for row in rows] == [
        None, "empty_text", "invalid_row", "invalid_row", "text_too_long", "non_finite_output", None,
        "non_finite_output", "invalid_unicode",
    ]  # fmt: skip
    assert rows[0]["score"] == pytest.approx(stub_score(GOOD), abs=1e-6)
    assert rows[6]["score"] == pytest.approx(stub_score("fine"), abs=1e-6)


ODD_TEXTS: dict[str, tuple[object, str | None]] = {
    "empty": ("", "empty_text"),
    "blank": (" \t\n ", "empty_text"),
    "zero-width": ("\u200b", "empty_text"),
    "emoji": ("👩‍👩‍👧‍👦 great 🎬", None),
    "right-to-left": ("فيلم رائع جدا", None),
    "nul": ("a\u0000b", None),
    "separators": ("a\u2028b\u0085c\u2029d", None),
    "special tokens": ("great film [SEP] [CLS] terrible [MASK] [PAD] [UNK]", None),
    "lone surrogate": ("bad \ud800 text", "invalid_unicode"),
    "one word of 100,000 letters": ("a" * 100_000, None),
    "too long": ("word " * 600, "text_too_long"),
    "number": (5, "invalid_row"),
    "null": (None, "invalid_row"),
}


async def test_odd_texts_get_a_defined_answer_each_and_the_same_at_both_doors(
    kafka: str, topics: Topics, consumer: Consumer, gateway_process: Gateway
) -> None:
    records: list[ToSend | bytes] = [request(name, text) for name, (text, _) in ODD_TEXTS.items()]
    found = await _ask(kafka, topics, records, set(ODD_TEXTS))
    assert {name: value.get("error", {}).get("code") for name, value in found.items()} == {
        name: code for name, (_, code) in ODD_TEXTS.items()
    }
    async with httpx.AsyncClient(base_url=gateway_process.url, timeout=30) as client:
        for name, (text, code) in ODD_TEXTS.items():
            answer = await client.post(
                "/predict",
                content=json.dumps({"text": text, "model": STUB}),
                headers={"content-type": "application/json"},
            )
            if code is not None:
                assert answer.json()["code"] == code, name
            else:
                assert answer.json()["score"] == pytest.approx(found[name]["output"]["score"], abs=1e-4), name


async def test_a_text_of_one_megabyte_is_too_long_unless_it_may_be_cut(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    text = "word " * 190_000
    records: list[ToSend | bytes] = [request("whole", text), request("cut", text, truncate=True)]
    found = await _ask(kafka, topics, records, {"whole", "cut"})
    assert found["whole"]["error"]["code"] == "text_too_long"
    assert "score" in found["cut"]["output"]


WRONG_RECORDS: dict[str, tuple[bytes, str]] = {
    "unknown model": (request("w1", GOOD, model="no_such_model"), "unknown_model"),
    "a bulk twin is no model": (request("w2", GOOD, model=f"{STUB}_bulk"), "unknown_model"),
    "no model": (b'{"id": "w3", "text": "x"}', "invalid_row"),
    "model a number": (b'{"id": "w4", "model": 4, "text": "x"}', "invalid_row"),
    "no text": (b'{"id": "w5", "model": "stub_faulty"}', "invalid_row"),
    "text and inputs": (b'{"id": "w6", "model": "stub_faulty", "text": "x", "inputs": []}', "invalid_row"),
    "inputs no array": (b'{"id": "w7", "model": "stub_faulty", "inputs": "x"}', "invalid_row"),
    "inputs empty": (b'{"id": "w8", "model": "stub_faulty", "inputs": []}', "invalid_row"),
    "truncate no boolean": (b'{"id": "w9", "model": "stub_faulty", "text": "x", "truncate": "yes"}', "invalid_row"),
    "too many inputs": (json.dumps({"id": "w10", "model": STUB, "inputs": ["x"] * 401}).encode(), "row_too_large"),
    "a text that makes the model fail": (request("w11", f"a {FAIL} film"), "model_failed"),
}


async def test_a_readable_record_that_is_wrong_gives_one_error_result_and_its_neighbours_are_right(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    neighbours = [f"n{index}" for index in range(24)]
    good: list[ToSend | bytes] = [request(name, f"{GOOD} {name}") for name in neighbours]
    names = {f"w{index}" for index in range(1, len(WRONG_RECORDS) + 1)}
    records = [*good[:12], *(value for value, _ in WRONG_RECORDS.values()), *good[12:]]
    found = await _ask(kafka, topics, records, names | set(neighbours))
    codes = {f"w{index}": code for index, (_, code) in enumerate(WRONG_RECORDS.values(), 1)}
    assert {name: found[name]["error"]["code"] for name in names} == codes
    assert "secret-inner-words" not in json.dumps(found)
    for name in neighbours:
        assert found[name]["output"]["score"] == pytest.approx(stub_score(f"{GOOD} {name}"), abs=1e-6)


async def test_records_that_are_readable_json_but_no_request_are_answered_under_their_place(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    before = len(await read(kafka, topics.results, lambda found: True))
    odd = [b"[1, 2]", b'"text"', b'{"id": 7, "model": "stub_faulty", "text": "x"}']
    await produce(kafka, topics.requests, [ToSend(value, partition=1) for value in odd])
    found = await read(kafka, topics.results, lambda found: len(found) >= before + len(odd))
    mine = [json.loads(m.value) for m in found if m.partition == 1][-len(odd) :]
    for value in mine:
        place = value["source"]
        assert value["id"] == f"{topics.requests}-1-{place['offset']}"
        assert value["error"]["code"] == "invalid_row"


async def test_an_unreadable_record_gives_one_dead_letter_as_it_came_and_no_result(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    broken = {
        b"{not json": ("invalid_json", []),
        b"": ("invalid_json", []),
        b'{"id": "x", "text": NaN}': ("invalid_json", []),
        b'{"id": "\xff"}': ("invalid_unicode", []),
        b"\xff\xff\xff": ("invalid_row", PROTOBUF),
        b"<xml/>": ("invalid_row", [("content-type", b"text/xml"), ("mine", b"kept")]),
    }
    before = len(await read(kafka, topics.results, lambda found: True))
    records = [ToSend(value, b"the key", 0, headers) for value, (_, headers) in broken.items()]
    await produce(kafka, topics.requests, [*records, request("after", GOOD)])
    letters = await read(kafka, topics.dlq, lambda found: len(found) >= len(broken))
    assert [letter.value for letter in letters] == list(broken)
    for letter, (code, headers) in zip(letters, broken.values(), strict=True):
        found = dict(letter.headers)
        assert letter.key == b"the key"
        assert found["twodoor-error-code"] == code.encode()
        assert found["twodoor-error-message"]
        assert found["twodoor-source-topic"] == topics.requests.encode()
        assert found["twodoor-source-partition"] == b"0"
        assert found["twodoor-source-offset"].isdigit()
        assert set(headers) <= set(letter.headers)
    after = await read(kafka, topics.results, lambda found: any(b'"after"' in m.value for m in found))
    assert len(after) == before + 1


async def test_a_tombstone_is_skipped_and_counted_and_the_topic_moves_on(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    counter = 'twodoor_records_skipped_total{reason="tombstone"}'
    before = consumer.count(counter)
    records = [ToSend(None, b"gone", 0), ToSend(request("after tombstone", GOOD), partition=0)]
    found = await _ask(kafka, topics, list(records), {"after tombstone"})
    assert "output" in found["after tombstone"]
    wait_until(lambda: consumer.count(counter) == before + 1, "tombstone counted")


async def test_a_protobuf_record_gives_a_protobuf_result(kafka: str, topics: Topics, consumer: Consumer) -> None:
    one = bulk_pb2.BulkRequest(id="pb one", model=STUB, text=GOOD)
    many = bulk_pb2.BulkRequest(id="pb many", model="embedding_model", inputs=[GOOD, ""])
    nobody = bulk_pb2.BulkRequest(model="no_such_model", text=GOOD)
    records = [ToSend(message.SerializeToString(), b"pb", 1, PROTOBUF) for message in (one, many, nobody)]
    await produce(kafka, topics.requests, records)
    found = await read(kafka, topics.results, lambda found: sum(map(_is_protobuf, found)) >= 3)
    first, second, third = [bulk_pb2.BulkResult.FromString(m.value) for m in found if _is_protobuf(m)]
    assert first.id == "pb one"
    assert first.output.classification.score == pytest.approx(stub_score(GOOD), abs=1e-6)
    assert first.source.topic == topics.requests
    assert len(second.predictions.predictions[0].embedding.values) == 384
    assert second.predictions.predictions[1].error.code == "empty_text"
    assert third.id == f"{topics.requests}-1-{third.source.offset}"
    assert third.error.code == "unknown_model"


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_a_producer_may_compress_with_any_codec(
    kafka: str, topics: Topics, consumer: Consumer, codec: str
) -> None:
    names = {f"{codec}{index}" for index in range(12)}
    records: list[ToSend | bytes] = [request(name, f"{GOOD} " * 20) for name in sorted(names)]
    await produce(kafka, topics.requests, records, compression=codec)
    found = await read(kafka, topics.results, lambda f: len(_named(f, names)) >= len(names))
    assert_each_once(list(_named(found, names)), names)


def _named(messages: list[Any], names: set[str]) -> list[dict[str, Any]]:
    values = [json.loads(message.value) for message in messages if not _is_protobuf(message)]
    return [value for value in values if value["id"] in names]


async def test_a_trace_goes_on_from_the_record_to_its_result(kafka: str, topics: Topics, consumer: Consumer) -> None:
    record = ToSend(request("traced", GOOD), headers=[("traceparent", TRACE.encode())])
    await produce(kafka, topics.requests, [record])
    found = await read(kafka, topics.results, lambda f: any(b'"traced"' in m.value for m in f))
    (message,) = [m for m in found if b'"traced"' in m.value]
    assert dict(message.headers)["traceparent"].split(b"-")[1] == TRACE.split("-")[1].encode()


async def test_an_answer_too_large_for_the_topic_is_one_error_result(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    body = json.dumps({"id": "huge", "model": "embedding_model", "inputs": ["x"] * 400}).encode()
    found = await _ask(kafka, topics, [body, request("after huge", GOOD)], {"huge", "after huge"})
    assert found["huge"]["error"]["code"] == "result_too_large"
    assert "output" in found["after huge"]


async def test_a_line_of_the_result_topic_holds_no_character_that_ends_lines(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    name = "id \u2028 \u0085 \u2029"
    await produce(kafka, topics.requests, [request(name, GOOD)])
    found = await read(kafka, topics.results, lambda f: any(b"id \\u2028" in m.value for m in f))
    (value,) = [m.value for m in found if b"id \\u2028" in m.value]
    assert len(value.decode().splitlines()) == 1
    assert json.loads(value)["id"] == name


async def test_junk_model_names_make_at_most_one_series_and_are_errors(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    junk = ["", 'quote " and \n newline', "x" * 5_000, *(f"junk{index}" for index in range(200))]
    before = set(consumer.metrics())
    records: list[ToSend | bytes] = [request(f"junk{i}", GOOD, model=name) for i, name in enumerate(junk)]
    found = await _ask(kafka, topics, records, {f"junk{i}" for i in range(len(junk))})
    assert {value["error"]["code"] for value in found.values()} <= {"unknown_model", "row_too_large"}
    new = set(consumer.metrics()) - before
    assert all('model="unknown"' in name for name in new)
    assert len(new) <= 6


async def test_metrics_tell_of_rows_batches_padding_backlog_and_lag(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    wait_until(lambda: consumer.count(f'twodoor_topic_lag_records{{topic="{topics.requests}"}}') == 0, "no lag")
    names = consumer.metrics()
    for name in (
        f'twodoor_rows_total{{lane="bulk",model="{STUB}",outcome="ok"}}',
        f'twodoor_rows_total{{lane="bulk",model="{STUB}",outcome="model_failed"}}',
        f'twodoor_bulk_microbatch_seconds_count{{model="{STUB}"}}',
        f'twodoor_bulk_padding_ratio_count{{model="{STUB}"}}',
        f'twodoor_bulk_backlog_rows{{model="{STUB}"}}',
        f'twodoor_bulk_oldest_row_seconds{{model="{STUB}"}}',
        'twodoor_retries_total{reason="failed"}',
    ):
        assert name in names
    assert consumer.ready() == {"triton": "up", "kafka": "up"}


async def test_alerts_and_dashboard_use_only_series_that_the_two_doors_really_show(
    kafka: str, topics: Topics, consumer: Consumer, gateway_process: Gateway
) -> None:
    await _ask(kafka, topics, [request("shown", GOOD)], {"shown"})
    async with httpx.AsyncClient(timeout=10) as http:
        (await http.post(f"{gateway_process.url}/predict", params={"text": GOOD})).raise_for_status()
        shown = "".join([(await http.get(f"{url}/metrics")).text for url in (gateway_process.url, consumer.url)])
    families = set(re.findall(r"^# TYPE (\w+) ", shown, re.MULTILINE))
    labels: dict[str, set[str]] = {}
    for name, text in re.findall(r"^(\w+)\{(.*)\} ", shown, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', text))
    uses = [(one.where, use) for one in expressions() for use in one.uses if use.name not in BY_PROMETHEUS]
    assert [(where, use.name) for where, use in uses if family(use.name) not in families] == []
    seen = [(where, use) for where, use in uses if use.name in labels]
    assert {"twodoor_rows_total", "twodoor_dependency_up", "twodoor_bulk_microbatch_seconds_bucket"} <= set(labels)
    assert [(where, use) for where, use in seen if set(use.labels) - labels[use.name] - TARGET_LABELS] == []


async def test_results_of_one_source_partition_stand_in_one_partition_in_offset_order(
    kafka: str, topics: Topics, consumer: Consumer
) -> None:
    found = [m for m in await read(kafka, topics.results, lambda f: True) if not _is_protobuf(m)]
    values = [json.loads(message.value) for message in found]
    assert all(m.partition == v["source"]["partition"] % PARTITIONS for m, v in zip(found, values, strict=True))
    assert_each_once(values, [value["id"] for value in values])


async def test_a_consumer_says_in_one_line_what_setting_is_wrong(
    consumer_factory: ConsumerFactory, topics: Topics
) -> None:
    wrong = consumer_factory(topics, TWODOOR_CONSUMER_WINDOW_RECORDS="many").launch()
    assert await asyncio.to_thread(wrong.child.wait, 30) == 2
    assert "TWODOOR_CONSUMER_WINDOW_RECORDS" in wrong.log()
    assert "Traceback" not in wrong.log()
