"""What cannot be seen from outside: which thread works, which tensors are sent, and where a trace goes on.

The door runs in the test's own loop, with its real server and a real Triton.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind
from tritonclient.grpc.aio import InferenceServerClient
from uvicorn import Server

from gateway import answers, routes
from gateway.app import build
from gateway.server import bind, server_config
from serving import pipeline, triton_client
from serving.preprocess import Tokenizer
from serving.settings import GatewaySettings, ModelSettings, TritonSettings
from tests.parts import Triton, free_ports
from tests.stubs import FAIL, SLEEP, STUB, stub_score

# What may be worked on in the event loop's thread, in bytes (issue: nothing over 64 KB).
MOST_ON_THE_LOOP = 65_536


@asynccontextmanager
async def door(triton: Triton, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway in this loop, ready; yields a client of it."""
    settings: dict[str, Any] = {"port": free_ports(1)[0], **changes}
    gateway = GatewaySettings(**settings)
    models: dict[str, Any] = {"repository": triton.repository}
    address: dict[str, Any] = {"grpc_address": triton.grpc_address, "poll_interval_s": 0.2}
    failures: list[BaseException] = []
    app = build(gateway, ModelSettings(**models), TritonSettings(**address), failures.append)
    config = server_config(app, gateway)
    server = Server(config)
    serving = asyncio.create_task(server.serve([bind(gateway)]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=60) as client:
            end_s = time.monotonic() + 30
            while not await _ready(client):
                assert time.monotonic() < end_s, failures
                await asyncio.sleep(0.05)
            yield client
    finally:
        server.should_exit = True
        await serving
    assert not failures


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return bool((await client.get("/readyz")).json()["dependencies"]["triton"] == "up")
    except httpx.TransportError:
        return False


class Watch:
    """Wraps functions and keeps the largest piece of work that was done on the loop's thread, and elsewhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._loop_thread = threading.get_ident()
        self.on_loop: dict[str, int] = {}
        self.elsewhere: dict[str, int] = {}

    def wrap(self, owner: Any, name: str, size: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            where = self.on_loop if threading.get_ident() == self._loop_thread else self.elsewhere
            where[name] = max(where.get(name, 0), size(result, *args, **kwargs))
            return result

        self._monkeypatch.setattr(owner, name, wrapped)


async def test_no_tokenizing_json_or_protobuf_work_over_64_kb_runs_on_the_event_loops_thread(
    triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    watch.wrap(routes, "decode_json", lambda result, content: len(content))
    watch.wrap(answers, "encode_json", lambda result, value: len(result))
    watch.wrap(Tokenizer, "encode", lambda result, self, texts, truncate: sum(map(len, texts)))
    watch.wrap(pipeline, "check_text", lambda result, text, most: len(text))
    watch.wrap(pipeline, "pad", lambda result, spec, rows: sum(array.nbytes for array in result.values()))
    watch.wrap(triton_client, "_tensor", lambda result, name, array: array.nbytes)
    async with door(triton) as client:
        million = await client.post("/predict", json={"text": "many words " * 90_000, "model": STUB})
        assert million.json()["code"] == "text_too_long"
        cut = await client.post("/predict", json={"text": "many words " * 90_000, "model": STUB, "truncate": True})
        assert cut.status_code == 200
        rows = [f"row {row} " + "word " * 480 for row in range(256)]
        assert (await client.post("/predict", json={"text": rows, "model": STUB})).status_code == 200
        many = [f"row {row}" for row in range(256)]
        vectors = await client.post("/predict", json={"text": many, "model": "embedding_model"})
        assert len(vectors.content) > 1_000_000
        assert (await client.post("/predict", json={"text": "short"})).status_code == 200
    assert {"decode_json", "encode_json", "encode", "check_text", "pad", "_tensor"} <= set(watch.on_loop)
    assert {name: size for name, size in watch.on_loop.items() if size > MOST_ON_THE_LOOP} == {}
    for name in ("decode_json", "encode_json", "encode", "check_text"):
        assert watch.elsewhere[name] > MOST_ON_THE_LOOP


async def test_the_loop_stays_free_while_megabytes_are_worked_on(triton: Triton) -> None:
    gaps_s: list[float] = []

    async def measure() -> None:
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now_s = time.monotonic()
            gaps_s.append(now_s - last_s)
            last_s = now_s

    content = json.dumps({"text": "many words " * 90_000, "model": STUB, "truncate": True}).encode()
    async with door(triton) as client:
        await client.post("/predict", json={"text": "warm", "model": STUB})
        measuring = asyncio.create_task(measure())
        for _ in range(3):
            response = await client.post("/predict", content=content, headers={"content-type": "application/json"})
            assert response.status_code == 200
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
    # Tokenizing one of these takes several hundred milliseconds; the bound leaves room for a busy machine.
    assert sorted(gaps_s)[-1] < 0.25


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, np.ndarray[Any, Any]], dict[str, str]]]:
    """What goes to Triton: model, tensors, headers."""
    calls: list[tuple[str, dict[str, np.ndarray[Any, Any]], dict[str, str]]] = []
    real = InferenceServerClient.infer

    async def infer(self: Any, model_name: str, inputs: Any, **kwargs: Any) -> Any:
        tensors = {
            tensor.name(): np.frombuffer(tensor._get_content(), dtype=np.int64).reshape(tensor.shape())
            for tensor in inputs
        }
        calls.append((model_name, tensors, kwargs.get("headers") or {}))
        return await real(self, model_name, inputs, **kwargs)

    monkeypatch.setattr(InferenceServerClient, "infer", infer)
    return calls


async def test_special_tokens_typed_by_a_caller_are_sent_as_text(triton: Triton, sent: list[Any]) -> None:
    async with door(triton) as client:
        for text in ("great film [SEP] [CLS] terrible [MASK] [PAD] [UNK]", "good</s><s>bad<pad>"):
            sent.clear()
            await client.post("/predict", json={"text": text, "model": STUB})
            ((_, tensors, _),) = sent
            ids, mask = tensors["input_ids"][0], tensors["attention_mask"][0]
            length = int(mask.sum())
            assert mask[:length].all()
            assert (ids[0], ids[length - 1]) == (101, 102)
            assert not {0, 100, 101, 102, 103} & set(ids[1 : length - 1].tolist())


async def test_one_text_is_padded_to_a_bucket_and_a_list_to_its_longest_row(triton: Triton, sent: list[Any]) -> None:
    async with door(triton) as client:
        await client.post("/predict", json={"text": "three short words", "model": STUB})
        await client.post("/predict", json={"text": ["three short words"] * 20, "model": STUB})
    shapes = [tensors["input_ids"].shape for _, tensors, _ in sent]
    assert shapes[0] == (1, 16)
    assert sorted(shapes[1:]) == [(4, 7), (8, 7), (8, 7)]
    assert {model for model, _, _ in sent} == {STUB}


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Spans that were recorded."""
    exporter = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    processor = SimpleSpanProcessor(exporter)
    provider.add_span_processor(processor)
    yield exporter
    processor.shutdown()


async def test_a_callers_trace_goes_on_to_triton(triton: Triton, sent: list[Any], spans: InMemorySpanExporter) -> None:
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with door(triton) as client:
        spans.clear()
        await client.post(
            "/predict", json={"text": "good", "model": STUB}, headers={"traceparent": f"00-{trace_id}-{caller}-01"}
        )
    server, call = (
        next(span for span in spans.get_finished_spans() if span.kind is kind)
        for kind in (SpanKind.SERVER, SpanKind.CLIENT)
    )
    assert server.name == "POST /predict"
    assert context_of(server.parent).span_id == int(caller, 16)
    assert context_of(call.parent).span_id == context_of(server.context).span_id
    assert (server.attributes or {})["http.response.status_code"] == 200
    ((_, _, headers),) = sent
    assert headers["traceparent"] == f"00-{trace_id}-{context_of(call.context).span_id:016x}-01"


async def test_without_a_callers_trace_each_call_starts_its_own_and_no_span_holds_the_text(
    triton: Triton, sent: list[Any], spans: InMemorySpanExporter
) -> None:
    async with door(triton) as client:
        spans.clear()
        for _ in range(2):
            await client.post("/predict", params={"text": "unloggable"})
    finished = spans.get_finished_spans()
    assert len(finished) == 4
    assert len({context_of(span.context).trace_id for span in finished}) == 2
    assert "unloggable" not in "".join(span.to_json() for span in finished)
    assert all("traceparent" in headers for _, _, headers in sent)


async def test_rows_of_concurrent_calls_reach_triton_as_one_request_and_only_the_bad_ones_fail(
    triton: Triton, sent: list[Any], spans: InMemorySpanExporter
) -> None:
    async with door(triton, max_in_flight=1) as client:
        spans.clear()
        slow = asyncio.create_task(client.post("/predict", json={"text": SLEEP, "model": STUB}))
        await until(lambda: len(sent) == 1)
        words = [f"one {FAIL}", "two words", "three words", "four words", "six words"]
        first, *others = (asyncio.create_task(client.post("/predict", json={"text": w, "model": STUB})) for w in words)
        late = await client.post(
            "/predict", json={"text": "late words", "model": STUB}, headers={"x-timeout-ms": "400"}
        )
        others.pop().cancel()  # this caller leaves while it waits
        answers = [await one for one in (slow, first, *others)]
    assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
    assert [answer.status_code for answer in answers] == [200, 422, 200, 200, 200]
    assert answers[1].json()["code"] == "model_failed"
    for answer, text in zip(answers[2:], words[1:4], strict=True):
        assert answer.json()["score"] == pytest.approx(stub_score(text), abs=1e-6)
    # The joined request, each of its rows alone, and the known row that says whose fault it was. None late, none left.
    rows = [len(tensors["input_ids"]) for _, tensors, _ in sent]
    assert rows[:3] == [1, 4, 1]
    assert set(rows[2:]) == {1}
    assert len(rows) == 7
    joined = next(span for span in spans.get_finished_spans() if span.kind is SpanKind.CLIENT and span.links)
    assert len({context_of(joined.parent).trace_id, *(link.context.trace_id for link in joined.links)}) == 4


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what other tasks of this loop do."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def context_of(context: SpanContext | None) -> SpanContext:
    assert context is not None
    return context
