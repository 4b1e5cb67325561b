"""The forms of a call, the body reader and the problem table, without a server."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from starlette.types import Message

from gateway.admission import ByteBudget
from gateway.body import BodyReader
from gateway.caller import while_connected
from gateway.forms import Call, parse_body, parse_query
from gateway.metrics import Metrics
from gateway.problems import CallerGone, Problem, problem_of, render
from serving import errors
from serving.deadline import Deadline
from serving.errors import Overloaded
from serving.settings import GatewaySettings


@pytest.mark.parametrize(
    ("query", "text"),
    [(b"text=a+b%20c", "a b c"), (b"text=%F0%9F%8E%AC", "🎬"), (b"text=a%00b", "a\x00b"), (b"text=1;2", "1;2"), (b"text=", "")],
)  # fmt: skip
def test_a_query_is_decoded_as_a_form_is(query: bytes, text: str) -> None:
    assert parse_query(query) == Call((text,), single=True)


def test_no_query_is_no_call() -> None:
    assert parse_query(b"") is None


@pytest.mark.parametrize(
    ("query", "field"),
    [(b"text=%ff", "text"), (b"text=%ED%A0%80", "text"), (b"text=a&text=b", "text"), (b"txt=a", "txt"), (b"text=a&x", "x")],
)  # fmt: skip
def test_a_bad_query_names_its_field(query: bytes, field: str) -> None:
    with pytest.raises(Problem) as refused:
        parse_query(query)
    assert (refused.value.status, refused.value.field) == (422, field)


def test_many_parameters_are_refused_before_they_are_kept() -> None:
    with pytest.raises(Problem) as refused:
        parse_query(b"&".join(b"a%d=1" % i for i in range(1000)))
    assert (refused.value.status, refused.value.field, refused.value.limit) == (422, "query", 16)


def test_model_and_truncate_belong_to_both_forms_of_a_body() -> None:
    assert parse_body({"text": "a", "model": "m", "truncate": True}, 4) == Call(("a",), True, "m", True)
    assert parse_body({"text": ["a", ""], "model": "m"}, 4) == Call(("a", ""), False, "m", False)


def test_the_limit_of_rows_is_the_last_that_is_taken() -> None:
    assert len(parse_body({"text": ["a"] * 4}, 4).texts) == 4
    with pytest.raises(Problem) as refused:
        parse_body({"text": ["a"] * 5}, 4)
    assert refused.value.limit == 4


def test_a_field_name_in_a_problem_is_short_and_clean() -> None:
    with pytest.raises(Problem) as refused:
        parse_body({"\ud800" + "x" * 5000: 1}, 4)
    shown = json.loads(bytes(render(refused.value, "id").body))["field"]
    assert shown.startswith("\\ud800x")
    assert len(shown) < 100


def every_error(cls: type[errors.TwodoorError]) -> list[type[errors.TwodoorError]]:
    return [cls, *(found for sub in cls.__subclasses__() for found in every_error(sub))]


@pytest.mark.parametrize("cls", every_error(errors.TwodoorError))
def test_every_error_of_the_tree_has_a_place_in_the_table(cls: type[errors.TwodoorError]) -> None:
    problem = problem_of(cls("some sentence", "model") if cls is errors.InvalidJob else cls("some sentence"))
    if issubclass(cls, errors.NonFiniteOutput):
        assert problem.status == 502
    elif issubclass(cls, errors.UnknownModel):
        assert problem.status == 404
    elif issubclass(cls, errors.RowError):
        assert problem.status == 422
    elif issubclass(cls, errors.JobError) and cls not in (errors.JobError, errors.InputLost):
        assert problem.status == {errors.UnknownJob: 404, errors.JobNotEnded: 409}.get(cls, 422)
    elif issubclass(cls, errors.QuotaError):
        assert problem.status == 429
        assert int(render(problem, "id").headers["retry-after"]) >= 1
    elif issubclass(cls, errors.DeadlineExceeded):
        assert problem.status == 504
    elif issubclass(cls, (errors.Overloaded, errors.DependencyDown)):
        assert problem.status == 503
        assert int(render(problem, "id").headers["retry-after"]) >= 1
    else:
        assert problem.status == 500
        assert "some sentence" not in problem.detail


def asgi(chunks: Sequence[bytes], then: Message | None = None) -> Callable[[], Awaitable[Message]]:
    """A receive that gives these chunks, then ``then``, or nothing any more."""
    messages: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": then is not None or number < len(chunks)}
        for number, chunk in enumerate(chunks, start=1)
    ]
    if then is not None:
        messages.append(then)

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    return receive


def reader(budget: ByteBudget | None = None, **changes: Any) -> BodyReader:
    settings: dict[str, Any] = {"max_body_bytes": 4096, **changes}
    return BodyReader(GatewaySettings(**settings), budget or ByteBudget(2**20, Metrics()))


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers)}


GZIP = (b"content-encoding", b"gzip")


@pytest.mark.parametrize("size", [0, 1, 4095, 4096])
@pytest.mark.parametrize("step", [1, 7, 100_000])
async def test_a_body_within_the_limit_is_read_whole_however_it_is_cut(size: int, step: int) -> None:
    content = bytes(i % 251 for i in range(size))
    for headers, sent in (((), content), ((GZIP,), gzip.compress(content))):
        chunks = [sent[i : i + step] for i in range(0, len(sent), step)] or [b""]
        async with reader().read(scope(*headers), asgi(chunks), Deadline.after_ms(5000)) as body:
            assert body == content


async def test_one_byte_over_the_limit_is_413_and_the_budget_is_whole_again() -> None:
    budget = ByteBudget(2**20, Metrics())
    for headers, sent in (((), b"x" * 4097), ((GZIP,), gzip.compress(b"x" * 4097))):
        with pytest.raises(Problem) as refused:
            async with reader(budget).read(scope(*headers), asgi([sent[:20], sent[20:]]), Deadline.after_ms(5000)):
                pass
        assert refused.value.status == 413
        assert budget.held == 0


async def test_bytes_count_as_held_until_the_call_is_done() -> None:
    budget = ByteBudget(2**20, Metrics())
    async with reader(budget).read(scope(), asgi([b"x" * 1000]), Deadline.after_ms(5000)):
        assert budget.held == 1000
    assert budget.held == 0


async def test_bodies_over_the_budget_of_all_calls_are_refused() -> None:
    budget = ByteBudget(1500, Metrics())
    async with reader(budget).read(scope(), asgi([b"x" * 1000]), Deadline.after_ms(5000)):
        with pytest.raises(Overloaded):
            async with reader(budget).read(scope(), asgi([b"x" * 1000]), Deadline.after_ms(5000)):
                pass
    assert budget.held == 0


async def test_a_caller_who_leaves_while_sending_is_gone() -> None:
    with pytest.raises(CallerGone):
        async with reader().read(scope(), asgi([b"x"], {"type": "http.disconnect"}), Deadline.after_ms(5000)):
            pass


async def test_a_caller_who_leaves_ends_the_work() -> None:
    started, ended, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def receive() -> Message:
        await left.wait()
        return {"type": "http.disconnect"}

    call = asyncio.create_task(while_connected(receive, work()))
    await started.wait()
    left.set()
    with pytest.raises(CallerGone):
        await call
    assert ended.is_set()


async def test_a_stop_from_outside_is_no_caller_who_left() -> None:
    call = asyncio.create_task(while_connected(asgi([]), asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
