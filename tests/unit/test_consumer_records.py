"""Records in and results out, without Kafka."""

import json

import numpy as np
import pytest

from batch_consumer.partition import Record, Window
from batch_consumer.records import Form, Request, Source, parse, render
from batch_consumer.results import Target, outgoing
from batch_consumer.rows import Outcome
from serving.errors import InvalidJson, InvalidRow, ModelFailed, RowError
from serving.postprocess import Classification, Embedding
from serving.v1 import bulk_pb2

SOURCE = Source("requests", 3, 17)
GOOD = Classification("positive", 0.9, {"negative": 0.1, "positive": 0.9}, True)


def make_record(value: bytes | None, headers: tuple[tuple[str, bytes | None], ...] = (), key: bytes = b"k") -> Record:
    window = Window(0, {}, 10, 2**20)
    record = Record(window, SOURCE, key, headers, value)
    if value is not None:
        try:
            record.expect(parse(value, headers, SOURCE, 100))
        except RowError as error:
            record.unreadable = error
    window.add([record])
    return record


def targets(limit: int = 1_048_576) -> tuple[Target, Target]:
    return Target("results", 2, limit), Target("dlq", 2, limit)


@pytest.mark.parametrize("content_type", [b"application/json", b"Application/JSON; charset=utf-8", None])
def test_json_is_the_form_where_the_header_says_so_or_nothing(content_type: bytes | None) -> None:
    headers = [] if content_type is None else [("content-type", content_type)]
    found = parse(b'{"model": "m", "text": "x"}', headers, SOURCE, 100)
    assert (found.id, found.model, found.texts, found.form) == ("requests-3-17", "m", ("x",), Form.JSON)
    assert found.error is None


def test_fields_nobody_knows_are_ignored_and_a_null_id_is_a_missing_one() -> None:
    found = parse(b'{"id": null, "model": "m", "inputs": ["a", "b"], "later": 1, "truncate": true}', [], SOURCE, 100)
    assert (found.id, found.texts, found.many, found.truncate) == ("requests-3-17", ("a", "b"), True, True)


def test_ids_that_cannot_be_echoed_are_refused_under_the_place_of_the_record() -> None:
    for body in (b'{"id": "\\ud800", "model": "m", "text": "x"}', b'{"id": 5, "model": "m", "text": "x"}'):
        found = parse(body, [], SOURCE, 100)
        assert found.id == "requests-3-17"
        assert found.error is not None
    long = parse(json.dumps({"id": "x" * 5_000, "model": "m", "text": "x"}).encode(), [], SOURCE, 100)
    assert long.error is not None
    assert long.error.code == "row_too_large"


def test_a_model_name_that_cannot_be_written_is_made_printable_in_its_error_result() -> None:
    found = parse(b'{"id": "a", "model": "\\ud800", "text": "x"}', [], SOURCE, 100)
    assert found.error is not None
    assert json.loads(render(found, (), SOURCE, 10_000))["error"]["code"] == "invalid_unicode"


@pytest.mark.parametrize("value", [b"", b"{", b"[1,", b"nul", b'{"a": NaN}', b"\xef\xbb\xbf{}"])
def test_what_is_no_json_is_unreadable(value: bytes) -> None:
    with pytest.raises(InvalidJson):
        parse(value, [], SOURCE, 100)


def test_deeply_nested_json_is_unreadable_and_harms_nobody() -> None:
    with pytest.raises(RowError):
        parse(b"[" * 200_000, [], SOURCE, 100)


def test_protobuf_with_text_and_inputs_or_neither_is_answered_not_dropped() -> None:
    headers = [("content-type", b"application/x-protobuf")]
    both = bulk_pb2.BulkRequest(id="a", model="m", text="x", inputs=["y"]).SerializeToString()
    neither = bulk_pb2.BulkRequest(id="b", model="m").SerializeToString()
    nameless = bulk_pb2.BulkRequest(id="c", text="x").SerializeToString()
    for value in (both, neither, nameless):
        found = parse(value, headers, SOURCE, 100)
        assert found.form is Form.PROTOBUF
        assert isinstance(found.error, InvalidRow)
    empty = bulk_pb2.BulkRequest(id="d", model="m", text="").SerializeToString()
    assert parse(empty, headers, SOURCE, 100).texts == ("",)


def test_results_have_the_request_s_form_and_all_fields() -> None:
    request = Request("a", "m", ("x", "y"), many=True, truncate=False, form=Form.PROTOBUF)
    outcomes: list[Outcome] = [GOOD, ModelFailed("no")]
    message = bulk_pb2.BulkResult.FromString(render(request, outcomes, SOURCE, 10_000))
    assert [p.WhichOneof("kind") for p in message.predictions.predictions] == ["classification", "error"]
    assert dict(message.predictions.predictions[0].classification.scores) == dict(GOOD.scores)
    assert message.predictions.predictions[0].classification.sentiment == "positive"
    as_json = Request("a", "m", ("x", "y"), many=True, truncate=False, form=Form.JSON)
    value = json.loads(render(as_json, outcomes, SOURCE, 10_000))
    assert value["predictions"][1] == {"error": {"code": "model_failed", "message": "no"}}
    assert value["source"] == {"topic": "requests", "partition": 3, "offset": 17}


@pytest.mark.parametrize("form", list(Form))
def test_an_answer_over_the_limit_becomes_an_error_that_fits(form: Form) -> None:
    request = Request("a", "m", ("x",), many=False, truncate=False, form=form)
    value = render(request, [Embedding(np.zeros(10_000, dtype=np.float32))], SOURCE, 1_000)
    assert len(value) <= 1_000
    if form is Form.JSON:
        assert json.loads(value)["error"]["code"] == "result_too_large"
    else:
        assert bulk_pb2.BulkResult.FromString(value).error.code == "result_too_large"


def test_each_record_of_a_prefix_gives_one_result_or_one_dead_letter_or_nothing_for_a_tombstone() -> None:
    answered = make_record(b'{"id": "a", "model": "m", "text": "x"}')
    answered.finish(0, GOOD)
    refused = make_record(b"[]")
    broken = make_record(b"{", (("mine", b"kept"), ("empty", None)))
    tombstone = make_record(None)
    written = outgoing([answered, refused, broken, tombstone], *targets())
    assert [(one.topic, one.partition, one.key) for one in written] == [
        ("results", 1, b"k"),
        ("results", 1, b"k"),
        ("dlq", 1, b"k"),
    ]
    assert written[2].value == b"{"
    headers = dict(written[2].headers)
    assert (headers["mine"], headers["empty"]) == (b"kept", None)
    assert headers["twodoor-error-code"] == b"invalid_json"
    assert headers["twodoor-source-offset"] == b"17"


def test_a_dead_letter_that_does_not_fit_is_cut_and_says_how_long_it_was() -> None:
    (letter,) = outgoing([make_record(b"{" * 5_000)], *targets(2_000))
    assert letter.size_bytes <= 2_000
    assert dict(letter.headers)["twodoor-value-bytes"] == b"5000"


def test_a_key_that_leaves_no_room_is_given_up_rather_than_the_result() -> None:
    record = make_record(b'{"id": "a", "model": "m", "text": "x"}', key=b"k" * 2_000)
    record.finish(0, GOOD)
    (result,) = outgoing([record], *targets(1_000))
    assert result.key is None
    assert json.loads(result.value or b"")["output"]["label"] == "positive"


@pytest.mark.parametrize("key_bytes", [1, 5_000])
@pytest.mark.parametrize("header_bytes", [1, 5_000])
def test_a_dead_letter_fits_whatever_was_large_in_its_record_and_says_what_is_missing(
    key_bytes: int, header_bytes: int
) -> None:
    record = make_record(b"{" * 5_000, (("mine", b"h" * header_bytes),), key=b"k" * key_bytes)
    (letter,) = outgoing([record], *targets(2_000))
    assert letter.size_bytes <= 2_000
    headers = dict(letter.headers)
    assert headers["twodoor-error-code"] == b"invalid_json"
    assert headers["twodoor-source-offset"] == b"17"
    assert headers.get("twodoor-headers-dropped") == (b"1" if header_bytes > 1 else None)
    assert (letter.key is None) == ("twodoor-key-bytes" in headers)
    assert (letter.key is None) == (key_bytes > 1 or header_bytes > 1)
