"""The Python client against a scripted server: what is sent, when it comes back, which error a caller sees."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import twodoor
from twodoor import AsyncClient, Client

GOOD_ROW = {"sentiment": "positive", "label": "positive", "score": 0.9, "scores": {"negative": 0.1, "positive": 0.9}}


@dataclass
class Reply:
    """One scripted answer; ``status`` 0 closes the connection without one."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0
    """Pause after each byte of the body."""


@dataclass
class Server:
    """A scripted server: gives its replies in turn, then good answers, and remembers what it was asked."""

    port: int
    replies: list[Reply] = field(default_factory=list)
    asked: list[tuple[dict[str, str], Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.asked.append(({name.lower(): value for name, value in self.headers.items()}, body))
            reply = state.replies.pop(0) if state.replies else Reply()
            time.sleep(reply.delay_s)
            if reply.status == 0:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            good = {"model": "sentiment_model", "model_version": "1", "predictions": [GOOD_ROW] * len(body["text"])}
            content = json.dumps(good if reply.body is None else reply.body).encode()
            self.send_response(reply.status)
            for name, value in {"X-Request-Id": "r-1", "Content-Length": str(len(content)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for piece in (content[i : i + 1] for i in range(len(content))) if reply.drip_s else (content,):
                    self.wfile.write(piece)
                    time.sleep(reply.drip_s)
            except (BrokenPipeError, ConnectionResetError):
                return  # a test whose caller does not wait

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.block_on_close = True
    state = Server(http.server_port)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    http.shutdown()
    http.server_close()
    thread.join(5)


Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, server: Server) -> Ask:
    """Call a method of either client by name, with the client's options under ``options``."""
    if request.param == "sync":

        async def call(method: str, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            with Client(server.url, **(options or {})) as client:
                return getattr(client, method)(*args, **kwargs)
    else:

        async def call(method: str, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            async with AsyncClient(server.url, **(options or {})) as client:
                return await getattr(client, method)(*args, **kwargs)

    return call


def problem(status: int, code: str, headers: dict[str, str] | None = None) -> Reply:
    return Reply(status, {"title": "t", "detail": f"about {code}", "status": status, "code": code}, headers or {})


async def test_one_text_gives_its_prediction(ask: Ask, server: Server) -> None:
    answer = await ask("predict", "fine", model="m", truncate=True, timeout_s=2, request_id="mine")
    assert (answer.sentiment, answer.label, answer.score) == ("positive", "positive", 0.9)
    headers, body = server.asked[0]
    assert body == {"text": ["fine"], "model": "m", "truncate": True}
    assert 1_500 < int(headers["x-timeout-ms"]) <= 2_000
    assert headers["x-request-id"] == "mine"


async def test_a_list_keeps_its_order_and_a_bad_row_stays_in_its_place(ask: Ask, server: Server) -> None:
    rows = [GOOD_ROW, {"error": {"code": "empty_text", "message": "text is empty"}}, {"embedding": [1, 2.5]}]
    server.replies = [Reply(body={"model": "m", "model_version": "3", "predictions": rows})]
    answer = await ask("predict_many", ["a", "", "c"])
    assert (answer.model, answer.model_version, answer.request_id) == ("m", "3", "r-1")
    assert answer.rows[0].label == "positive"
    assert isinstance(answer.rows[1], twodoor.RowFailed)
    assert answer.rows[1].code == "empty_text"
    assert answer.rows[2].embedding == [1.0, 2.5]


async def test_one_text_without_an_answer_raises_its_error(ask: Ask, server: Server) -> None:
    rows = [{"error": {"code": "text_too_long", "message": "600 tokens"}}]
    server.replies = [Reply(body={"model": "m", "model_version": "1", "predictions": rows})]
    with pytest.raises(twodoor.RowFailed, match="600 tokens") as caught:
        await ask("predict", "long")
    assert (caught.value.code, caught.value.request_id) == ("text_too_long", "r-1")


async def test_any_text_travels_as_it_is(ask: Ask, server: Server) -> None:
    texts = ["\ud800 lone", "nul \x00", "line\u2028end", "שלום", "🙂"]
    await ask("predict_many", texts)
    assert server.asked[0][1]["text"] == texts


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (problem(404, "unknown_model"), twodoor.UnknownModel),
        (problem(401, "unauthorized"), twodoor.Unauthorized),
        (problem(403, "forbidden"), twodoor.Forbidden),
        (problem(404, "not_found"), twodoor.NotFound),
        (problem(409, "job_not_ended"), twodoor.Conflict),
        (problem(413, "body_too_large"), twodoor.Refused),
        (problem(422, "invalid_row"), twodoor.Invalid),
        (problem(429, "quota_exceeded"), twodoor.QuotaExceeded),
        (problem(429, "rate_limited"), twodoor.RateLimited),
        (problem(503, "overloaded", {"Retry-After": "7"}), twodoor.Unavailable),
        (problem(504, "deadline_exceeded"), twodoor.DeadlineExceeded),
        (problem(500, "internal_error"), twodoor.ServerFailed),
    ],
)
async def test_each_status_is_its_own_error_with_code_status_and_request_id(
    ask: Ask, server: Server, reply: Reply, kind: type[twodoor.TwodoorError]
) -> None:
    server.replies = [reply]
    with pytest.raises(twodoor.TwodoorError, match="about") as caught:
        await ask("predict", "x", options={"retries": 0})
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.status) == (reply.body["code"], reply.status)
    assert caught.value.request_id == "r-1"
    assert caught.value.retry_after_s == (7.0 if reply.headers else None)


async def test_a_call_comes_back_after_retry_after_and_not_before(ask: Ask, server: Server) -> None:
    server.replies = [problem(503, "overloaded", {"Retry-After": "1"})]
    began = time.monotonic()
    assert (await ask("predict", "x")).label == "positive"
    assert 1.0 <= time.monotonic() - began < 3.0
    first, second = (int(headers["x-timeout-ms"]) for headers, _ in server.asked)
    assert second <= first - 1_000, "the deadline holds for all tries together"


async def test_retries_have_a_bound(ask: Ask, server: Server) -> None:
    server.replies = [problem(503, "dependency_down") for _ in range(9)]
    with pytest.raises(twodoor.Unavailable):
        await ask("predict", "x", options={"retries": 2})
    assert len(server.asked) == 3


@pytest.mark.parametrize("later", ["3600", "date"])
async def test_a_retry_after_beyond_the_bound_is_left_to_the_caller(ask: Ask, server: Server, later: str) -> None:
    from datetime import UTC, datetime, timedelta

    value = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True) if later == "date" else later
    server.replies = [problem(503, "overloaded", {"Retry-After": value})]
    with pytest.raises(twodoor.Unavailable) as caught:
        await ask("predict", "x")
    assert len(server.asked) == 1
    assert caught.value.retry_after_s == pytest.approx(3600, abs=5)


async def test_an_error_of_the_call_is_not_asked_again(ask: Ask, server: Server) -> None:
    server.replies = [problem(422, "invalid_row")]
    with pytest.raises(twodoor.Refused):
        await ask("predict", "x")
    assert len(server.asked) == 1


async def test_a_broken_connection_is_asked_again(ask: Ask, server: Server) -> None:
    server.replies = [Reply(status=0)]
    assert (await ask("predict", "x")).label == "positive"
    assert len(server.asked) == 2


async def test_a_silent_server_ends_at_the_deadline(ask: Ask, server: Server) -> None:
    server.replies = [Reply(delay_s=2.0)]
    began = time.monotonic()
    with pytest.raises(twodoor.DeadlineExceeded) as caught:
        await ask("predict", "x", timeout_s=0.2)
    assert time.monotonic() - began < 1.5
    assert caught.value.code == "deadline_exceeded"


async def test_a_server_that_answers_byte_by_byte_ends_at_the_deadline_too(ask: Ask, server: Server) -> None:
    server.replies = [Reply(drip_s=0.05)]
    began = time.monotonic()
    with pytest.raises(twodoor.DeadlineExceeded):
        await ask("predict", "x", timeout_s=0.2)
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize(
    "body", [{"hello": "world"}, [], {"model": "m", "model_version": "1", "predictions": []}, "text"]
)
async def test_an_answer_of_another_program_is_named_as_such(ask: Ask, server: Server, body: Any) -> None:
    server.replies = [Reply(body=body)]
    with pytest.raises(twodoor.BadAnswer):
        await ask("predict", "x")


async def test_a_proxys_error_page_still_has_its_kind(ask: Ask, server: Server) -> None:
    server.replies = [Reply(502, "<html>")]
    with pytest.raises(twodoor.ServerFailed) as caught:
        await ask("predict", "x")
    assert (caught.value.code, caught.value.status) == ("http_502", 502)


async def test_nobody_at_the_address_is_its_own_error() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with Client(url, retries=1) as client, pytest.raises(twodoor.NotReachable, match="nobody answers at"):
            client.predict("x")
        async with AsyncClient(url, retries=0) as other:
            with pytest.raises(twodoor.NotReachable):
                await other.predict("x")


def test_a_string_where_a_list_belongs_is_refused_before_it_is_sent_letter_by_letter(server: Server) -> None:
    with Client(server.url) as client, pytest.raises(TypeError, match="one string"):
        client.predict_many("abc")
    assert server.asked == []


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Client().url == "http://127.0.0.1:8080"
    monkeypatch.setenv("TWODOOR_GATEWAY_PORT", "9999")
    assert Client().url == "http://127.0.0.1:9999"
    monkeypatch.setenv("TWODOOR_CLIENT_URL", "https://example.test/base/")
    assert Client().url == "https://example.test/base"
    with pytest.raises(ValueError, match="no http"):
        Client("localhost:8080")
    for wrong in ("http://127.0.0.1:abc", "http://127.0.0.1:99999"):
        with pytest.raises(ValueError, match="no port"):
            Client(wrong)


def test_a_proxy_of_the_environment_does_not_stand_before_loopback(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with Client(server.url, retries=0) as client:
        assert client.predict("x").label == "positive"


def test_importing_the_client_loads_no_server_package() -> None:
    code = (
        "import sys, twodoor; twodoor.Client; twodoor.AsyncClient; import twodoor.cli; "
        "bad = {m.split('.')[0] for m in sys.modules} & "
        "{'serving', 'aiokafka', 'numpy', 'pydantic', 'grpc', 'google', 'orjson', 'local_stack', 'model_builder', 'gateway', 'jobs', 'psycopg'};"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
