"""The stream's client against a scripted server: what breaks is taken up, what is refused is raised, memory is bounded."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

import twodoor
from twodoor import AsyncClient, Client, stream_async, stream_wire
from twodoor.stream_wire import StreamItem

GOOD: dict[str, Any] = {
    "label": "positive",
    "score": 0.9,
    "scores": {"negative": 0.1, "positive": 0.9},
    "sentiment": "positive",
}
Script = Callable[[ServerConnection, dict[str, Any]], None]


def good(socket: ServerConnection, message: dict[str, Any]) -> None:
    socket.send(json.dumps({"id": message["id"], "output": GOOD}))


@dataclass
class Scripted:
    """A server whose connections follow one script each, then answer well; it keeps all it was sent."""

    url: str = ""
    scripts: list[Script] = field(default_factory=list)
    refusals: list[tuple[int, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    got: list[dict[str, Any]] = field(default_factory=list)

    def serve(self, socket: ServerConnection) -> None:
        script = self.scripts.pop(0) if self.scripts else good
        try:
            for content in socket:
                self.got.append(json.loads(content))
                script(socket, self.got[-1])
        except ConnectionClosed:
            return

    def process(self, socket: ServerConnection, request: Request) -> Response | None:
        self.heads.append({name.lower(): value for name, value in request.headers.raw_items()})
        if not self.refusals:
            return None
        status, headers, problem = self.refusals.pop(0)
        response = socket.respond(status, json.dumps(problem))
        response.headers.update(headers)
        return response


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    listening: Server = serve(scripted.serve, "127.0.0.1", 0, process_request=scripted.process, compression=None)
    scripted.url = f"http://127.0.0.1:{listening.socket.getsockname()[1]}"
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield scripted
    listening.shutdown()
    thread.join()


def breaks_after(count: int, code: int | None = None) -> Script:
    """Answer so many messages, then end the connection: with a close code, or as a cable that was cut."""
    left = itertools.count(count, -1)

    def script(socket: ServerConnection, message: dict[str, Any]) -> None:
        if next(left) > 0:
            good(socket, message)
        elif code is None:
            socket.socket.shutdown(2)
        else:
            socket.close(code, "as the test wants it")

    return script


def refuses(code: str, times: int) -> Script:
    left = itertools.count(times, -1)

    def script(socket: ServerConnection, message: dict[str, Any]) -> None:
        if next(left) > 0:
            error = {"code": code, "message": "not now", "retry_after_s": 0.01}
            socket.send(json.dumps({"id": message["id"], "error": error}))
        else:
            good(socket, message)

    return script


def by_client(url: str, texts: Any, **options: Any) -> list[twodoor.StreamAnswer]:
    with Client(url, api_key="sk-1") as client:
        return list(client.stream(texts, **options))


def by_async_client(url: str, texts: Any, **options: Any) -> list[twodoor.StreamAnswer]:
    async def collect() -> list[twodoor.StreamAnswer]:
        async with AsyncClient(url, api_key="sk-1") as client:
            return [answer async for answer in client.stream(texts, **options)]

    return asyncio.run(collect())


@pytest.fixture(params=[by_client, by_async_client], ids=["sync", "async"])
def stream(request: pytest.FixtureRequest) -> Callable[..., list[twodoor.StreamAnswer]]:
    return request.param  # type: ignore[no-any-return]


Stream = Callable[..., list[twodoor.StreamAnswer]]


def test_every_text_gets_its_answer_and_keeps_its_own_id(server: Scripted, stream: Stream) -> None:
    items = ["plain", {"text": "with id", "id": "a"}, {"text": "the same id", "id": "a", "truncate": True}]
    answers = sorted(stream(server.url, items, model="m", timeout_s=2.5), key=lambda answer: answer.index)
    assert [(answer.index, answer.id) for answer in answers] == [(0, None), (1, "a"), (2, "a")]
    assert all(answer.answer == twodoor.Prediction(**GOOD) for answer in answers)
    assert server.got[2] == {"id": "2", "model": "m", "text": "the same id", "truncate": True}
    head = server.heads[0]
    assert (head["authorization"], head["x-timeout-ms"]) == ("Bearer sk-1", "2500")
    assert "sec-websocket-extensions" not in head


@pytest.mark.parametrize("code", [None, 1001, 1011, 1012])
def test_what_was_unanswered_when_a_connection_broke_is_sent_again(
    server: Scripted, stream: Stream, code: int | None
) -> None:
    server.scripts = [breaks_after(3, code), breaks_after(2, code)]
    answers = stream(server.url, (f"text {number}" for number in range(40)), window=8, in_order=True)
    assert [answer.index for answer in answers] == list(range(40))
    assert all(isinstance(answer.answer, twodoor.Prediction) for answer in answers)
    assert len(server.heads) == 3
    assert len(server.got) <= 40 + 2 * 8


def test_a_text_that_is_turned_away_comes_again_a_few_times_and_then_is_told(server: Scripted, stream: Stream) -> None:
    server.scripts = [refuses("overloaded", 2)]
    assert isinstance(stream(server.url, ["patient"])[0].answer, twodoor.Prediction)
    assert len(server.got) == 3
    server.scripts = [refuses("rate_limited", 9)]
    told = stream(server.url, ["again"])[0].answer
    assert isinstance(told, twodoor.RateLimited)
    assert (told.code, told.retry_after_s) == ("rate_limited", 0.01)


def test_an_error_of_one_text_stands_in_its_place(server: Scripted, stream: Stream) -> None:
    server.scripts = [refuses("empty_text", 1)]
    first, second = stream(server.url, ["", "fine"], in_order=True)
    assert isinstance(first.answer, twodoor.RowFailed)
    assert isinstance(second.answer, twodoor.Prediction)


def test_no_more_texts_are_taken_than_the_window_holds(server: Scripted) -> None:
    taken = itertools.count()
    most = 0

    def texts() -> Iterator[str]:
        for number in range(100):
            next(taken)
            yield f"text {number}"

    with Client(server.url) as client:
        for given, _ in enumerate(client.stream(texts(), window=4)):
            most = max(most, int(repr(taken)[6:-1]) - given)
    assert most <= 6


def test_what_would_come_again_is_raised_at_once(server: Scripted, stream: Stream) -> None:
    server.scripts = [breaks_after(1, 1009)]
    with pytest.raises(twodoor.Refused, match="as the test wants it"):
        stream(server.url, ["a", "b"])
    server.refusals = [(401, {"WWW-Authenticate": "Bearer"}, {"code": "unauthorized", "detail": "send a known key"})]
    with pytest.raises(twodoor.Unauthorized, match="send a known key"):
        stream(server.url, ["a"])
    with pytest.raises(ValueError, match="an item is a text"):
        stream(server.url, [{"txt": "a"}])
    with pytest.raises(ValueError, match="window"):
        stream(server.url, ["a"], window=0)


def test_a_handshake_that_is_refused_for_the_moment_is_tried_again(server: Scripted, stream: Stream) -> None:
    server.refusals = [(503, {"Retry-After": "0"}, {"code": "overloaded", "detail": "not now"})]
    assert len(stream(server.url, ["a"])) == 1
    assert len(server.heads) == 2


def test_nobody_at_the_address_is_told_within_its_patience(stream: Stream) -> None:
    with pytest.raises(twodoor.NotReachable):
        stream("http://127.0.0.1:1", ["a"], outage_s=0.1)


async def test_who_sends_and_who_iterates_may_be_two_tasks(server: Scripted) -> None:
    async with AsyncClient(server.url) as client, client.open_stream(window=2) as opened:

        async def send() -> None:
            for number in range(20):
                await opened.send(f"text {number}", id=f"n{number}")
            opened.end()

        sending = asyncio.create_task(send())
        ids = [answer.id async for answer in opened]
        await sending
        with pytest.raises(ValueError, match="ended"):
            await opened.send("late")
    assert sorted(ids, key=str) == sorted((f"n{number}" for number in range(20)), key=str)


async def test_a_sender_learns_what_ended_the_stream(server: Scripted) -> None:
    server.scripts = [breaks_after(0, 1008)]
    async with AsyncClient(server.url) as client, client.open_stream(window=1) as opened:
        await opened.send("a")
        waiting = asyncio.create_task(opened.send("b"))
        with pytest.raises(twodoor.Refused):
            await anext(opened)
        with pytest.raises(twodoor.Refused):
            await waiting


@pytest.fixture
def short_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_wire, "_GRACE_S", 0.1)
    monkeypatch.setattr(stream_async, "_LOOK_S", 0.02)


def answers_after(seconds: float) -> Script:
    def script(socket: ServerConnection, message: dict[str, Any]) -> None:
        time.sleep(seconds)
        good(socket, message)

    return script


def by_resting_client(url: str, count: int) -> list[twodoor.StreamAnswer]:
    """Take its time over each answer; the next text is sent only then."""
    given = []
    with Client(url) as client:
        for answer in client.stream(map(str, range(count)), window=1, timeout_s=0.1, outage_s=0.2):
            given.append(answer)
            time.sleep(0.3)
    return given


def by_resting_async_client(url: str, count: int) -> list[twodoor.StreamAnswer]:
    """Have a text now and then."""

    async def texts() -> AsyncIterator[StreamItem]:
        for number in range(count):
            yield str(number)
            await asyncio.sleep(0.3)

    async def collect() -> list[twodoor.StreamAnswer]:
        async with AsyncClient(url) as client:
            return [answer async for answer in client.stream(texts(), timeout_s=0.1, outage_s=0.2)]

    return asyncio.run(collect())


@pytest.mark.parametrize("rest", [by_resting_client, by_resting_async_client], ids=["sync", "async"])
@pytest.mark.usefixtures("short_clocks")
def test_a_stream_may_rest_for_longer_than_an_answer_or_an_outage_may_take(
    server: Scripted, rest: Callable[[str, int], list[twodoor.StreamAnswer]]
) -> None:
    server.scripts = [answers_after(0.05)]
    assert [answer.index for answer in rest(server.url, 2)] == [0, 1]
    assert len(server.heads) == 1  # nobody was silent: nothing was asked


@pytest.mark.parametrize("rest", [by_resting_client, by_resting_async_client], ids=["sync", "async"])
def test_a_connection_that_ended_while_the_stream_rested_is_opened_anew(
    server: Scripted, rest: Callable[[str, int], list[twodoor.StreamAnswer]]
) -> None:
    def once(socket: ServerConnection, message: dict[str, Any]) -> None:
        good(socket, message)
        socket.close(1000, "no message for a while")

    server.scripts = [once]
    assert [answer.index for answer in rest(server.url, 2)] == [0, 1]
    assert len(server.heads) == 2


@pytest.mark.usefixtures("short_clocks")
def test_a_server_that_owes_an_answer_and_says_nothing_is_given_up(
    server: Scripted, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twodoor.stream._LOOK_S", 0.02)
    server.scripts = [lambda socket, message: None]
    assert len(stream(server.url, ["a"], timeout_s=0.1)) == 1
    assert len(server.heads) == 2


def test_what_came_before_the_stream_ended_is_given(server: Scripted) -> None:
    def script(socket: ServerConnection, message: dict[str, Any]) -> None:
        if message["id"] == "3":
            for number in range(3):
                good(socket, {"id": str(number)})
            socket.close(1008, "the key is no longer known")

    server.scripts = [script]
    given: list[int] = []
    with Client(server.url) as client:
        answers = client.stream(map(str, range(4)), window=4)
        with pytest.raises(twodoor.Refused):
            given.extend(answer.index for answer in answers)
    assert given == [0, 1, 2]


async def test_a_stream_that_was_left_opens_no_connection_for_what_is_unanswered(server: Scripted) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    server.scripts = [lambda socket, message: loop.call_soon_threadsafe(asked.set) and None]
    async with AsyncClient(server.url) as client:
        async with client.open_stream() as opened:
            await opened.send("a")
            waiting = asyncio.create_task(anext(opened))
            await asked.wait()
        with pytest.raises(twodoor.ConnectionLost, match="closed"):
            await waiting
    assert len(server.heads) == 1
