"""A JSON lines file becomes records: where a row ends, which line is bad and why."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.v1.bulk_pb2 import BulkRequest, BulkResult
from twodoor.commands.consume import _show
from twodoor.lines import BadLine, LineSplitter, decode_result, encode, parse


def split(data: bytes, max_bytes: int = 1_000, block: int = 7) -> list[tuple[int, bytes | None]]:
    splitter = LineSplitter(max_bytes)
    found = [line for start in range(0, len(data), block) for line in splitter.feed(data[start : start + block])]
    return found + splitter.end()


def test_a_file_made_on_windows_keeps_its_first_row() -> None:
    assert split(b'\xef\xbb\xbf"a"\r\n"b"\r\n\r\n') == [(1, b'"a"'), (2, b'"b"'), (3, b"")]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_row(separator: str) -> None:
    line = json.dumps(f"a{separator}b", ensure_ascii=False).encode()
    assert split(line + b"\n") == [(1, line)]


@pytest.mark.parametrize("block", [1, 5, 1_000])
def test_a_line_over_the_limit_is_named_and_the_next_one_is_read(block: int) -> None:
    data = b"x" * 500 + b"\nok\n" + b"y" * 501
    assert split(data, max_bytes=100, block=block) == [(1, None), (2, b"ok"), (3, None)]


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line)), st.integers(1, 50))
def test_blocks_of_any_size_give_the_same_lines(lines: list[bytes], block: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    assert split(data, block=block) == split(data, block=max(1, len(data)))


def test_a_string_is_a_text_and_an_object_a_request() -> None:
    assert parse(b'"hi"', "m") == {"model": "m", "text": "hi"}
    line = b'{"id": "1", "inputs": ["a", ""], "model": "other", "truncate": true}'
    assert parse(line, "m") == {"id": "1", "inputs": ["a", ""], "model": "other", "truncate": True}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b'"\xff"', "not UTF-8 at byte 1"),
        (b"5", "neither a JSON string nor an object"),
        (b"{}", "either text or inputs"),
        (b'{"text": "a", "inputs": []}', "either text or inputs"),
        (b'{"text": null}', "text is not a string"),
        (b'{"text": "a", "truncate": 1}', "truncate is not a boolean"),
        (b'{"inputs": ["a", 1]}', "not a list of strings"),
        (b'{"text": "a", "id": 5}', "id is not a string"),
        (b'{"text": "a", "modle": "x"}', "unknown field 'modle'"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_line_that_is_no_record_says_why(line: bytes, reason: str) -> None:
    with pytest.raises(BadLine, match=reason):
        parse(line, "m")


def test_both_forms_hold_the_same_request_and_the_id_is_the_key() -> None:
    request = parse(b'{"id": "k", "text": "caf\\u00e9\\u2028", "truncate": true}', "m")
    as_json, as_protobuf = encode(request, "json"), encode(request, "protobuf")
    assert as_json.key == as_protobuf.key == b"k"
    assert len(as_json.value.decode().splitlines()) == 1
    message = BulkRequest.FromString(as_protobuf.value)
    assert (message.id, message.model, message.text, message.truncate) == ("k", "m", "café\u2028", True)
    assert as_protobuf.headers == (("content-type", b"application/x-protobuf"),)


def test_a_lone_surrogate_passes_as_json_and_is_refused_where_protobuf_cannot_hold_it() -> None:
    request = parse(b'"\\ud800"', "m")
    assert json.loads(encode(request, "json").value)["text"] == "\ud800"
    with pytest.raises(BadLine, match="lone surrogate"):
        encode(request, "protobuf")


def test_a_protobuf_result_reads_as_its_json_form() -> None:
    result = BulkResult(id="1", model="m")
    result.output.classification.label = result.output.classification.sentiment = "positive"
    result.output.classification.score = 0.75
    result.output.classification.scores["positive"] = 0.75
    result.source.topic, result.source.partition, result.source.offset = "t", 2, 9
    assert decode_result(result.SerializeToString(), (("content-type", b"application/x-protobuf"),)) == {
        "id": "1",
        "model": "m",
        "output": {"sentiment": "positive", "label": "positive", "score": 0.75, "scores": {"positive": 0.75}},
        "source": {"topic": "t", "partition": 2, "offset": 9},
    }


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            {"event": "ended", "id": "job_1", "status": "completed", "rows": {"total": 1}},
            "job_1                                    ended completed",
        ),
        (
            {"event": "refused", "code": "invalid_json", "message": "not\x1b JSON"},
            "-                                        refused invalid_json: not\ufffd JSON",
        ),
        (
            {"id": "r1", "output": {"label": "positive", "scores": {"positive": 0.75}}},
            "r1                                       positive 0.750",
        ),
    ],
)
def test_consume_shows_a_result_or_an_event_of_a_job_in_one_line(
    value: dict[str, object], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _show(SimpleNamespace(value=json.dumps(value).encode(), headers=()), as_json=False)
    assert capsys.readouterr().out == f"{line}\n"


def test_a_record_that_is_no_result_is_said_to_be_none() -> None:
    for value, headers in ((b"[]", ()), (b"{", ()), (b"\xff\xff", (("content-type", b"application/x-protobuf"),))):
        with pytest.raises(ValueError, match=r".*"):
            decode_result(value, headers)
