"""What the door bounds while it reads: bodies by decoded bytes, heads by size and time; and how a connection ends."""

import gzip
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import GatewayFactory
from tests.parts import Gateway, Triton, wait_until
from tests.rawhttp import Reply, chunked, connect, post

GOOD = json.dumps({"text": "a gorgeous, witty, seductive movie"}).encode()
MB = 2**20


@pytest.fixture(scope="module")
def gateway(gateway_factory: GatewayFactory, triton: Triton) -> Gateway:
    """A gateway that loses patience sooner than by default."""
    return gateway_factory(
        triton.grpc_address,
        triton.repository,
        TWODOOR_GATEWAY_HEAD_TIMEOUT_S=1,
        TWODOOR_GATEWAY_BODY_TIMEOUT_S=1,
    ).start()


@pytest.fixture(autouse=True)
def _plain_call_still_works(gateway: Gateway) -> Iterator[None]:
    yield
    with connect(gateway.port) as connection:
        connection.send(post("/predict", GOOD))
        assert connection.reply().status == 200
    assert "Traceback" not in gateway.log()


def problem(reply: Reply, status: int, code: str) -> dict[str, object]:
    assert reply.status == status, reply
    assert reply.headers["content-type"] == "application/problem+json"
    members: dict[str, object] = json.loads(reply.body)
    assert members["code"] == code
    assert members["request_id"] == reply.headers["x-request-id"]
    return members


def resident_bytes(gateway: Gateway) -> int:
    status = Path(f"/proc/{gateway.child.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found.group(1)) * 1024


def test_a_gzipped_body_is_answered(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        for body in (gzip.compress(GOOD), gzip.compress(GOOD[:9]) + gzip.compress(GOOD[9:])):
            connection.send(post("/predict", body, "Content-Encoding: gzip"))
            assert connection.reply().status == 200


def test_a_gzip_bomb_is_413_and_memory_grows_by_about_the_limit(gateway: Gateway) -> None:
    bomb = gzip.compress(b" " * (1 << 26))
    with connect(gateway.port) as connection:  # once before, so that what is allocated once does not count
        connection.send(post("/predict", bomb, "Content-Encoding: gzip"))
        connection.reply()
    before = resident_bytes(gateway)
    for _ in range(5):
        with connect(gateway.port) as connection:
            connection.send(post("/predict", bomb, "Content-Encoding: gzip"))
            members = problem(connection.reply(), 413, "body_too_large")
            assert members["limit"] == 2 * MB
    assert resident_bytes(gateway) - before < 8 * MB


def test_64_mb_in_chunks_without_a_length_is_413_while_reading(gateway: Gateway) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    before = resident_bytes(gateway)
    with connect(gateway.port) as connection:
        connection.send(head)
        sent_all = connection.send_all(chunked(b" " * 65536 for _ in range(1024)))
        if sent_all:
            raise AssertionError("the server read 64 MB")
    assert resident_bytes(gateway) - before < 12 * MB


def test_the_answer_to_a_body_that_is_too_large_reaches_a_caller_who_sends_on(gateway: Gateway) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(gateway.port) as connection:
        connection.send(head)
        connection.send_all(chunked(b" " * 65536 for _ in range(60)))
        reply = connection.reply()
        problem(reply, 413, "body_too_large")
        assert reply.headers["connection"] == "close"
        assert connection.closed_within(3)


def test_a_length_over_the_limit_is_413_before_any_byte_of_it(gateway: Gateway) -> None:
    head = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 10000000000\r\n"
    with connect(gateway.port) as connection:
        connection.send(f"{head}Expect: 100-continue\r\n\r\n".encode())
        started_s = time.monotonic()
        problem(connection.reply(), 413, "body_too_large")  # and no 100 before it
        assert time.monotonic() - started_s < 0.5
        assert connection.closed_within(0.5)


def test_a_caller_that_asks_to_continue_is_told_to(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        request = post("/predict", GOOD, "Expect: 100-continue")
        connection.send(request[: -len(GOOD)])
        assert connection.reply().status == 100
        connection.send(GOOD)
        assert connection.reply().status == 200


@pytest.mark.parametrize("encoding", ["zstd", "gzip, gzip", "br", "deflate"])
def test_another_encoding_is_415_and_says_what_is_taken(gateway: Gateway, encoding: str) -> None:
    with connect(gateway.port) as connection:
        connection.send(post("/predict", gzip.compress(GOOD), f"Content-Encoding: {encoding}"))
        reply = connection.reply()
        problem(reply, 415, "unsupported_encoding")
        assert reply.headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize(
    "body",
    [b"not gzip", gzip.compress(GOOD)[:-9], gzip.compress(GOOD) + b"junk", b""],
    ids=["no gzip", "cut", "more follows", "empty"],
)
def test_a_body_that_is_not_the_gzip_it_says_is_400(gateway: Gateway, body: bytes) -> None:
    with connect(gateway.port) as connection:
        connection.send(post("/predict", body, "Content-Encoding: gzip"))
        problem(connection.reply(), 400, "invalid_body")


def test_the_limit_is_the_same_for_plain_chunked_and_gzip(gateway: Gateway) -> None:
    def padded(size: int) -> bytes:
        return GOOD + b" " * (size - len(GOOD))

    for size, status in ((2 * MB, 200), (2 * MB + 1, 413)):
        body = padded(size)
        with connect(gateway.port) as connection:
            connection.send_all([post("/predict", body)])
            assert connection.reply().status == status
        with connect(gateway.port) as connection:
            connection.send(post("/predict", gzip.compress(body), "Content-Encoding: gzip"))
            assert connection.reply().status == status
        with connect(gateway.port) as connection:
            head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
            connection.send(head + b"\r\n\r\n")
            connection.send_all(chunked([body]))
            assert connection.reply().status == status


def test_an_unread_body_never_becomes_the_next_request(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(post("/nowhere", b"x" * 70_000))
        reply = connection.reply()
        problem(reply, 404, "not_found")
        assert reply.headers["connection"] == "close"
        connection.send_all([post("/predict", GOOD)])
        assert connection.closed_within(3)


def test_a_refused_call_whose_body_was_read_keeps_its_connection(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(post("/predict", b'{"text": 5}') + post("/predict", GOOD))
        assert connection.reply().status == 422
        assert connection.reply().status == 200


def test_slow_heads_are_closed_in_time_and_hurt_nobody(gateway: Gateway) -> None:
    with connect(gateway.port) as other:
        slow = [connect(gateway.port) for _ in range(100)]
        opened = [context.__enter__() for context in slow]
        try:
            started_s = time.monotonic()
            for connection in opened:
                connection.send(b"POST /predict HTTP/1.1\r\nHost: x\r\nX-S")
            other.send(post("/predict", GOOD))
            assert other.reply().status == 200
            assert all(connection.closed_within(5) for connection in opened)
            assert time.monotonic() - started_s < 5
        finally:
            for context in slow:
                context.__exit__(None, None, None)


def test_a_kept_connection_may_rest_longer_than_a_head_may_take(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(post("/predict", GOOD))
        connection.reply()
        assert not connection.closed_within(1.5)
        connection.sock.settimeout(10)
        connection.send(post("/predict", GOOD))
        assert connection.reply().status == 200
        connection.send(b"POST /pre")
        assert connection.closed_within(5)


def test_a_slow_body_is_408_and_the_connection_is_closed(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(post("/predict", GOOD)[:-5])
        members = problem(connection.reply(), 408, "body_timeout")
        assert members["limit"] == 1
        assert connection.closed_within(3)


def test_a_deadline_runs_while_the_body_is_read(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(post("/predict", GOOD, "X-Timeout-Ms: 200")[:-5])
        problem(connection.reply(), 504, "deadline_exceeded")


def test_an_endless_head_is_431(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(b"POST /predict HTTP/1.1\r\nHost: x\r\nX-Big: ")
        connection.send_all(b"a" * 65536 for _ in range(4))
        problem(connection.reply(), 431, "head_too_large")
        assert connection.closed_within(3)


def test_what_is_not_http_is_a_problem_too(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(b"hello there\r\n\r\n")
        problem(connection.reply(), 400, "invalid_request")
        assert connection.closed_within(3)


def test_a_connection_that_ends_in_the_middle_of_a_body_leaves_nothing_behind(gateway: Gateway) -> None:
    for _ in range(20):
        with connect(gateway.port) as connection:
            connection.send(post("/predict", GOOD)[:-5])
    wait_until(lambda: b"\ntwodoor_admitted_tokens 0.0" in gateway.get("/metrics"), "no tokens held")


def test_endless_trailers_are_431_and_memory_does_not_grow(gateway: Gateway) -> None:
    before = resident_bytes(gateway)
    with connect(gateway.port) as connection:
        connection.send(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.send(b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(GOOD), GOOD))
        field = b"X-Filler: " + b"y" * 4000 + b"\r\n"
        all_sent = connection.send_all(field * 16 for _ in range(MB // 1024))
        assert not all_sent or connection.closed_within(0.5)
    assert resident_bytes(gateway) - before < 8 * MB


def test_trailers_of_a_good_call_are_ignored(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.send(b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(GOOD), GOOD))
        assert connection.reply().status == 200
        connection.send(post("/predict", GOOD))
        assert connection.reply().status == 200


def test_the_body_of_a_call_that_offers_an_upgrade_is_its_body_and_no_request(gateway: Gateway) -> None:
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    call = post("/predict", GOOD, *offer)
    head = call[: -len(GOOD)]
    hidden = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(gateway.port) as connection:
        connection.send(call)
        assert connection.reply().status == 200
        connection.send(head)
        connection.send(GOOD[:5])
        time.sleep(0.05)  # another segment: nothing of the server tells when it has read the first
        connection.send(GOOD[5:])
        assert connection.reply().status == 200
        connection.send(post("/predict", hidden, *offer))
        problem(connection.reply(), 422, "invalid_json")
        connection.send(post("/predict", GOOD))
        assert connection.reply().status == 200


def test_a_request_in_the_line_behind_another_may_have_a_large_body(gateway: Gateway) -> None:
    body = json.dumps({"text": ["fine"] * 3, "truncate": True}).encode().ljust(400_000)
    second = post("/predict", body)
    with connect(gateway.port) as connection:
        connection.send(post("/predict", GOOD) + second[:10_000])
        assert connection.reply().status == 200
        connection.send(second[10_000:])
        assert connection.reply().status == 200


def test_what_is_not_http_behind_a_good_call_does_not_take_the_place_of_its_answer(gateway: Gateway) -> None:
    with connect(gateway.port) as connection:
        connection.send(post("/predict", GOOD) + b"\x00nonsense\r\n\r\n")
        assert connection.reply().status == 200
        assert connection.closed_within(2)


def test_connect_is_refused_and_nothing_is_tunnelled(gateway: Gateway) -> None:
    for target in (b"example.org:443", b"/predict"):
        with connect(gateway.port) as connection:
            connection.send(b"CONNECT " + target + b" HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n")
            problem(connection.reply(), 400, "invalid_request")
            assert connection.closed_within(2)


def test_gzip_that_never_becomes_a_body_is_413_while_reading(gateway: Gateway) -> None:
    empty = gzip.compress(b"")
    # The same with the largest extra field (RFC 1952 section 2.3.1.1): still nothing of a body.
    large = empty[:3] + b"\x04" + empty[4:10] + b"\xff\xff" + bytes(0xFFFF) + empty[10:]
    assert gzip.decompress(large) == b""
    nothing = empty * 500 + large
    with connect(gateway.port) as connection:
        connection.send(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.send(b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.send_all(chunked([nothing] * 40))
        assert problem(connection.reply(), 413, "body_too_large")["limit"] == 2 * MB


def test_a_caller_who_does_not_take_its_answer_is_let_go(gateway: Gateway) -> None:
    texts = json.dumps({"text": ["fine"] * 256, "model": "embedding_model"}).encode()
    with connect(gateway.port) as connection:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.send(post("/predict", texts) * 8)
        port = connection.sock.getsockname()[1]
        wait_until(lambda: _held(gateway, port), "the connection is there")
        wait_until(lambda: not _held(gateway, port), "the connection is given up", timeout_s=10)


def _held(gateway: Gateway, port: int) -> bool:
    """Return whether the gateway still holds its end of the connection from this port, by /proc/net/tcp."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (int(fields[1][-4:], 16), int(fields[2][-4:], 16)) == (gateway.port, port):
            return fields[9] != "0"  # no inode: the kernel alone still tries to send
    return False
