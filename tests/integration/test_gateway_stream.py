"""The stream: every message is answered once, whatever is wrong with it; a connection ends with the code that says why."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.asyncio.client import connect

from tests.integration.gateway_stream import (
    BINARY,
    CONTINUED,
    PING,
    PONG,
    TEXT,
    frame,
    handshake,
    message,
    metric,
    raw_stream,
)
from tests.parts import Gateway, answers, wait_until
from tests.rawhttp import Reply
from tests.rawhttp import connect as connect_http
from tests.stubs import SLEEP, STUB, stub_score

MB = 2**20


@pytest.fixture
def gateway(gateway_process: Gateway) -> Iterator[Gateway]:
    """The shared gateway; after each test it holds nothing, logged no traceback and answers."""
    yield gateway_process

    def holds_nothing() -> bool:
        values = page(f"{gateway_process.url}/metrics")
        return not metric(values, "twodoor_stream_connections") and not metric(values, "twodoor_admitted_tokens")

    wait_until(holds_nothing, "the gateway holds nothing")
    assert "Traceback" not in gateway_process.log()
    assert answers(f"{gateway_process.url}/healthz")


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return str(response.read().decode())


def stream_url(gateway: Gateway) -> str:
    return f"ws{gateway.url.removeprefix('http')}/v1/stream"


async def test_many_texts_on_one_connection_each_get_their_own_answer_once(gateway: Gateway) -> None:
    texts = {f"n{number}": f"text number {number}" for number in range(150)}
    async with connect(stream_url(gateway), compression=None) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"]
        sending = asyncio.gather(*(socket.send(message(name, text, model=STUB)) for name, text in texts.items()))
        answers = [json.loads(await socket.recv()) for _ in texts]
        await sending
    assert sorted(answer["id"] for answer in answers) == sorted(texts)
    for answer in answers[::10]:
        assert set(answer) == {"id", "output"}
        assert answer["output"]["score"] == pytest.approx(stub_score(texts[answer["id"]]), abs=1e-3)


async def test_a_slow_text_keeps_no_other_waiting_and_its_deadline_is_its_own(gateway: Gateway) -> None:
    async with connect(stream_url(gateway), additional_headers={"X-Timeout-Ms": "400"}) as socket:
        await socket.send(message("slow", f"the {SLEEP}", model=STUB))
        await socket.send(message("quick", "a gorgeous, witty, seductive movie"))
        quick, slow = [json.loads(await socket.recv()) for _ in range(2)]
    assert quick["id"] == "quick"
    assert quick["output"]["label"] == "positive"
    assert (slow["id"], slow["error"]["code"]) == ("slow", "deadline_exceeded")


BAD: list[tuple[str, str | None, str, str, float | None]] = [
    ("{", None, "invalid_json", "message", None),
    ("NaN", None, "invalid_json", "message", None),
    ("[" * 100_000, None, "invalid_json", "message", None),
    ("[]", None, "invalid_request", "message", None),
    ('{"text": "a"}', None, "invalid_request", "id", None),
    ('{"id": 5, "text": "a"}', None, "invalid_request", "id", None),
    (json.dumps({"id": "i" * 257, "text": "a"}), None, "invalid_request", "id", 256),
    ('{"id": "\\ud800", "text": "a"}', None, "invalid_unicode", "id", None),
    ('{"id": "x"}', "x", "invalid_row", "text", None),
    ('{"id": "x", "text": ["a"]}', "x", "invalid_row", "text", None),
    ('{"id": "x", "text": "a", "more": 1}', "x", "invalid_request", "more", None),
    ('{"id": "x", "text": "a", "truncate": 1}', "x", "invalid_request", "truncate", None),
    ('{"id": "x", "text": "a", "model": 1}', "x", "invalid_request", "model", None),
    ('{"id": "x", "text": "a", "model": "none"}', "x", "unknown_model", "model", None),
    ('{"id": "x", "text": "a", "model": "sentiment_model_bulk"}', "x", "unknown_model", "model", None),
    ('{"id": "x", "text": " "}', "x", "empty_text", "text", None),
    ('{"id": "x", "text": "\\ud800"}', "x", "invalid_unicode", "text", None),
    (message("x", "word " * 600), "x", "text_too_long", "text", 512),
    (message("x", "w" * 1_000_001), "x", "row_too_large", "text", 1_000_000),
]


async def test_a_bad_message_is_answered_with_field_and_limit_and_the_connection_goes_on(gateway: Gateway) -> None:
    async with connect(stream_url(gateway), compression=None) as socket:
        for content, given, code, field, limit in BAD:
            await socket.send(content)
            answer = json.loads(await socket.recv())
            error = answer["error"]
            assert (answer["id"], error["code"], error["field"], error.get("limit")) == (given, code, field, limit)
            assert error["message"]
        await socket.send(message("good", "fine"))
        assert "output" in json.loads(await socket.recv())
    counted = page(f"{gateway.url}/metrics")
    assert metric(counted, 'twodoor_stream_messages_total{outcome="text_too_long"}') >= 1
    assert metric(counted, "twodoor_stream_message_duration_seconds_count") >= len(BAD)


async def test_what_no_message_may_be_closes_with_the_code_that_says_so(gateway: Gateway) -> None:
    big = b" " * (2 * MB // 3)
    wrong: list[tuple[int, list[bytes]]] = [
        (1009, [frame(TEXT, big, fin=False), frame(CONTINUED, big, fin=False), frame(CONTINUED, big)]),
        (1009, [frame(TEXT, b"x" * 2 * MB)[:20]]),  # by its head alone
        (1007, [frame(TEXT, b"\xff\xfe")]),
        (1007, [frame(TEXT, b"{", fin=False), frame(CONTINUED, b"\xc3")]),
        (1003, [frame(BINARY, b'{"id": "x", "text": "a"}')]),
        (1002, [frame(TEXT, b"compressed", reserved=0x40)]),
        (1002, [frame(TEXT, b"{}", masked=False)]),
        (1002, [frame(CONTINUED, b"{}")]),
        (1002, [frame(PING, b"x" * 126)]),
    ]
    for code, frames in wrong:
        async with raw_stream(gateway.port, "Sec-WebSocket-Extensions: permessage-deflate") as socket:
            assert b"permessage-deflate" not in socket.head
            socket.send(*frames)
            assert (await socket.close_code())[0] == code


async def test_callers_who_leave_before_the_answer_leave_nothing_behind(gateway: Gateway) -> None:
    for number in range(100):
        async with raw_stream(gateway.port) as socket:
            socket.send(frame(TEXT, message("x", f"text {number}", model=STUB).encode()))
    # the fixture sees that the gauges fall to 0 and no error is logged


async def test_fragments_and_pings_between_them_make_one_message(gateway: Gateway) -> None:
    content = message("x", "gr\u00fcn and \u4e16\u754c", model=STUB)
    halves = content.encode()[:25], content.encode()[25:]
    async with raw_stream(gateway.port) as socket:
        socket.send(frame(TEXT, halves[0], fin=False), frame(CONTINUED, b"", fin=False) * 1_000)
        socket.send(frame(PING, b"still there?"))
        assert await socket.receive() == (PONG, b"still there?")
        socket.send(frame(CONTINUED, halves[1]))
        opcode, payload = await socket.receive()
    assert opcode == TEXT
    assert json.loads(payload)["output"]["score"] == pytest.approx(stub_score("gr\u00fcn and \u4e16\u754c"), abs=1e-3)


def ask(gateway: Gateway, request: bytes) -> tuple[Reply, dict[str, Any]]:
    with connect_http(gateway.port) as connection:
        connection.send(request)
        reply = connection.reply()
        return reply, json.loads(reply.body)


def test_a_handshake_that_is_none_is_told_what_belongs_to_one(gateway: Gateway) -> None:
    for request in (
        b"GET /v1/stream HTTP/1.1\r\nHost: x\r\n\r\n",
        handshake().replace(b"Version: 13", b"Version: 8"),
        handshake().replace(b"Key: ", b"Key: short"),
        handshake("Content-Length: 4") + b"body",
        handshake().replace(b"HTTP/1.1", b"HTTP/1.0"),
        handshake().replace(b"WebSocket\r\n", b"h2c\r\n"),
    ):
        reply, problem = ask(gateway, request)
        assert (reply.status, problem["code"], reply.headers["upgrade"]) == (426, "upgrade_required", "websocket")
        assert reply.headers["sec-websocket-version"] == "13"
    assert ask(gateway, handshake(path="/healthz"))[0].status == 200
    assert ask(gateway, handshake().replace(b"GET", b"POST"))[0].status == 405


def test_a_handshake_that_is_refused_gets_a_problem_as_any_request(gateway: Gateway) -> None:
    for headers, path, status, field in (
        (("Origin: https://evil.example",), "/v1/stream", 403, "header Origin"),
        (("Origin: http://x",), "/v1/stream", 403, "header Origin"),
        (("X-Timeout-Ms: soon",), "/v1/stream", 422, "header X-Timeout-Ms"),
        ((), "/v1/stream?text=secret", 422, "query"),
    ):
        reply, problem = ask(gateway, handshake(*headers, "X-Request-Id: mine", path=path))
        assert (reply.status, problem["field"], problem["request_id"]) == (status, field, "mine")
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.headers["x-request-id"] == "mine"
    assert "secret" not in gateway.log()
