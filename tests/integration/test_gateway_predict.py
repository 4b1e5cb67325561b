"""`/predict` against a real Triton: its forms, and what bad input gets."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.parts import Gateway
from tests.stubs import FAIL, INF, NAN, SLEEP, STUB, stub_score

GOOD = "a gorgeous, witty, seductive movie"


@pytest.fixture(scope="module")
def http(gateway_process: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway_process.url, timeout=30) as client:
        yield client


@pytest.fixture(autouse=True)
def _plain_call_still_works(http: httpx.Client, gateway_process: Gateway) -> Iterator[None]:
    """After every case a plain call gets 200, and the log holds no traceback."""
    yield
    response = http.post("/predict", params={"text": GOOD})
    assert response.status_code == 200
    assert "Traceback" not in gateway_process.log()


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Return a problem's members after checking what every problem has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    members: dict[str, Any] = response.json()
    assert members["code"] == code
    assert members["status"] == status
    assert members["type"] == "about:blank"
    assert members["title"]
    assert members["detail"]
    assert members["request_id"] == response.headers["x-request-id"]
    return members


# --- forms


def test_a_text_in_the_query_gives_sentiment_and_score_and_nothing_else(http: httpx.Client) -> None:
    answer = http.post("/predict", params={"text": GOOD}).json()
    assert set(answer) == {"sentiment", "score"}
    assert answer["sentiment"] == "positive"
    assert answer["score"] > 0.9


def test_score_is_the_probability_of_positive_also_for_a_negative_text(http: httpx.Client) -> None:
    answer = http.post("/predict", json={"text": "dull, lifeless and far too long"}).json()
    assert answer["sentiment"] == "negative"
    assert answer["score"] < 0.1


def test_query_and_body_and_list_give_the_same_answer(http: httpx.Client) -> None:
    by_query = http.post("/predict", params={"text": GOOD}).json()
    by_body = http.post("/predict", json={"text": GOOD}).json()
    listed = http.post("/predict", json={"text": [GOOD, "x"]}).json()["predictions"][0]
    assert by_query == by_body
    assert listed["sentiment"] == by_body["sentiment"]
    assert listed["score"] == pytest.approx(by_body["score"], abs=1e-4)


def test_a_list_is_answered_in_order_with_the_error_of_a_row_in_its_place(http: httpx.Client) -> None:
    texts = [GOOD, "", "dull", " \n ", "word " * 600, "\u200b", GOOD]
    answer = http.post("/predict", json={"text": texts}).json()
    assert set(answer) == {"model", "model_version", "predictions"}
    assert (answer["model"], answer["model_version"]) == ("sentiment_model", "1")
    rows = answer["predictions"]
    assert [row.get("error", {}).get("code") for row in rows] == [
        None, "empty_text", None, "empty_text", "text_too_long", "empty_text", None,
    ]  # fmt: skip
    assert set(rows[0]) == {"sentiment", "label", "score", "scores"}
    assert rows[0]["score"] == rows[0]["scores"]["positive"]
    assert sum(rows[0]["scores"].values()) == pytest.approx(1)
    assert rows[0]["score"] == pytest.approx(rows[6]["score"], abs=1e-4)
    assert rows[2]["label"] == "negative"


def test_a_list_of_one_is_still_a_list(http: httpx.Client) -> None:
    assert len(http.post("/predict", json={"text": [GOOD]}).json()["predictions"]) == 1


def test_a_full_list_gives_each_row_the_answer_it_gets_alone(http: httpx.Client) -> None:
    texts = [f"text number {row} " + "with some words more " * (row % 23) for row in range(256)]
    rows = http.post("/predict", json={"text": texts, "model": STUB}).json()["predictions"]
    assert [row["score"] for row in rows] == pytest.approx([stub_score(text) for text in texts], abs=1e-6)


def test_another_model_answers_one_text_in_its_own_form(http: httpx.Client) -> None:
    answer = http.post("/predict", json={"text": GOOD, "model": "embedding_model"}).json()
    assert set(answer) == {"embedding"}
    assert len(answer["embedding"]) == 384
    assert sum(value * value for value in answer["embedding"]) == pytest.approx(1, abs=1e-3)


def test_many_embeddings_come_in_one_answer(http: httpx.Client) -> None:
    answer = http.post("/predict", json={"text": [f"row {i}" for i in range(40)], "model": "embedding_model"}).json()
    assert [len(row["embedding"]) for row in answer["predictions"]] == [384] * 40


# --- bad calls

BAD_CALLS: dict[str, tuple[dict[str, Any], int, str, dict[str, Any]]] = {
    "no text at all": ({}, 422, "invalid_row", {"field": "text"}),
    "an object without text": ({"json": {}}, 422, "invalid_row", {"field": "text"}),
    "a number": ({"json": {"text": 5}}, 422, "invalid_row", {"field": "text"}),
    "null": ({"json": {"text": None}}, 422, "invalid_row", {"field": "text"}),
    "a boolean": ({"json": {"text": True}}, 422, "invalid_row", {"field": "text"}),
    "an object as text": ({"json": {"text": {"a": 1}}}, 422, "invalid_row", {"field": "text"}),
    "an empty list": ({"json": {"text": []}}, 422, "invalid_row", {"field": "text"}),
    "null in a list": ({"json": {"text": ["ok", None]}}, 422, "invalid_row", {"field": "text[1]", "row": 1}),
    "a number in a list": ({"json": {"text": ["ok", 5]}}, 422, "invalid_row", {"field": "text[1]", "row": 1}),
    "a list in a list": ({"json": {"text": [["ok"]]}}, 422, "invalid_row", {"field": "text[0]", "row": 0}),
    "too many rows": ({"json": {"text": ["x"] * 257}}, 422, "too_many_rows", {"field": "text", "limit": 256}),
    "too many characters": (
        {"json": {"text": "x" * 1_000_001}}, 422, "row_too_large", {"field": "text", "limit": 1_000_000},
    ),
    "an unknown field": ({"json": {"text": "x", "modle": "y"}}, 422, "invalid_request", {"field": "modle"}),
    "an unknown field that is no character": (
        {"content": b'{"text": "x", "\\ud800": 1}', "headers": {"content-type": "application/json"}},
        422, "invalid_request", {"field": "\\ud800"},
    ),
    "truncate as text": ({"json": {"text": "x", "truncate": "yes"}}, 422, "invalid_request", {"field": "truncate"}),
    "truncate null": ({"json": {"text": "x", "truncate": None}}, 422, "invalid_request", {"field": "truncate"}),
    "an array as body": ({"json": ["x"]}, 422, "invalid_request", {"field": "body"}),
    "broken JSON": (
        {"content": b'{"text": ', "headers": {"content-type": "application/json"}}, 422, "invalid_json", {"field": "body"},
    ),
    "NaN in JSON": (
        {"content": b'{"text": NaN}', "headers": {"content-type": "application/json"}}, 422, "invalid_json", {},
    ),
    "nested without end": (
        {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 422, "invalid_json", {},
    ),
    "not UTF-8": (
        {"content": b'{"text": "\xff"}', "headers": {"content-type": "application/json"}},
        422, "invalid_unicode", {"field": "body"},
    ),
    "an empty body": ({"content": b"", "headers": {"content-type": "application/json"}}, 422, "invalid_row", {}),
    "a form": ({"data": {"text": "x"}}, 415, "unsupported_media_type", {"field": "header Content-Type"}),
    "no content type": ({"content": b'{"text": "x"}'}, 415, "unsupported_media_type", {}),
    "another charset": (
        {"content": b'{"text": "x"}', "headers": {"content-type": "application/json; charset=latin-1"}},
        415, "unsupported_media_type", {},
    ),
    "an empty text": ({"json": {"text": ""}}, 422, "empty_text", {"field": "text"}),
    "a blank text": ({"json": {"text": " \t\n"}}, 422, "empty_text", {"field": "text"}),
    "an empty text in the query": ({"params": {"text": ""}}, 422, "empty_text", {"field": "text"}),
    "text twice in the query": ({"params": [("text", "a"), ("text", "b")]}, 422, "invalid_row", {"field": "text"}),
    "model in the query": ({"params": {"text": "a", "model": "b"}}, 422, "invalid_request", {"field": "model"}),
    "query and body": ({"params": {"text": "a"}, "json": {"text": "b"}}, 422, "invalid_request", {"field": "body"}),
    "a lone surrogate": (
        {"content": b'{"text": "a \\ud800 b"}', "headers": {"content-type": "application/json"}},
        422, "invalid_unicode", {"field": "text"},
    ),
    "a text over max_tokens": ({"json": {"text": "word " * 600}}, 422, "text_too_long", {"field": "text", "limit": 512}),
    "a model that is a number": ({"json": {"text": "x", "model": 3}}, 422, "invalid_request", {"field": "model"}),
    "a model that is null": ({"json": {"text": "x", "model": None}}, 422, "invalid_request", {"field": "model"}),
    "a model that is an object": ({"json": {"text": "x", "model": {"a": 1}}}, 422, "invalid_request", {"field": "model"}),
    "an unknown model": ({"json": {"text": "x", "model": "nope"}}, 404, "unknown_model", {"field": "model"}),
    "an empty model name": ({"json": {"text": "x", "model": ""}}, 404, "unknown_model", {"field": "model"}),
    "a bulk twin": ({"json": {"text": "x", "model": "sentiment_model_bulk"}}, 404, "unknown_model", {"field": "model"}),
    "a stub's twin": ({"json": {"text": "x", "model": f"{STUB}_bulk"}}, 404, "unknown_model", {"field": "model"}),
    "a model name with quote and newline": ({"json": {"text": "x", "model": 'a"\n\\'}}, 404, "unknown_model", {}),
    "a model name of 1 MB": ({"json": {"text": "x", "model": "m" * 1_000_000}}, 404, "unknown_model", {}),
    "a model name that is no character": (
        {"content": b'{"text": "x", "model": "\\udfff"}', "headers": {"content-type": "application/json"}},
        404, "unknown_model", {"field": "model"},
    ),
    "a text on which the model fails": ({"json": {"text": f"a {FAIL}", "model": STUB}}, 422, "model_failed", {"field": "text"}),
    "a text that gives NaN": ({"json": {"text": f"a {NAN}", "model": STUB}}, 502, "non_finite_output", {"field": "text"}),
    "a text that gives Inf": ({"json": {"text": f"a {INF}", "model": STUB}}, 502, "non_finite_output", {"field": "text"}),
    "a timeout that is text": ({"params": {"text": "x"}, "headers": {"x-timeout-ms": "soon"}}, 422, "invalid_request", {"field": "header X-Timeout-Ms"}),
    "a timeout of nothing": ({"params": {"text": "x"}, "headers": {"x-timeout-ms": "0"}}, 422, "invalid_request", {"limit": 60_000}),
    "a negative timeout": ({"params": {"text": "x"}, "headers": {"x-timeout-ms": "-5"}}, 422, "invalid_request", {}),
    "a deadline that passes": (
        {"json": {"text": SLEEP, "model": STUB}, "headers": {"x-timeout-ms": "100"}}, 504, "deadline_exceeded", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_bad_call_gets_a_problem_that_names_what_is_wrong(http: httpx.Client, case: str) -> None:
    request, status, code, members = BAD_CALLS[case]
    response = http.post("/predict", **request)
    found = problem(response, status, code)
    assert members.items() <= found.items()
    assert "secret-inner-words" not in response.text
    assert len(response.content) < 2_000


# --- odd texts


@pytest.mark.parametrize(
    "text",
    [
        "🎬 great film 👨‍👩‍👧‍👦",
        "فيلم رائع جدا",
        "a\x00b",
        "great film [SEP] [CLS] terrible [MASK] [PAD] [UNK]",
        "good</s><s>bad<pad>",
        "a\u2028b\x85c\u2029d",
        "w" * 100_000,
        "e\u0301" * 50,
    ],
    ids=["emoji", "right-to-left", "NUL", "special tokens", "other special tokens", "line ends", "long word", "marks"],
)
def test_an_odd_text_gets_the_same_answer_alone_and_in_a_list(http: httpx.Client, text: str) -> None:
    alone = http.post("/predict", json={"text": text, "truncate": True})
    assert alone.status_code == 200, alone.text
    listed = http.post("/predict", json={"text": [GOOD, text], "truncate": True}).json()["predictions"][1]
    assert listed["sentiment"] == alone.json()["sentiment"]
    assert listed["score"] == pytest.approx(alone.json()["score"], abs=1e-4)


def test_a_megabyte_of_text_is_too_long_or_cut_when_asked(http: httpx.Client) -> None:
    text = "a very long review " * 52_000
    members = problem(http.post("/predict", json={"text": text}), 422, "text_too_long")
    assert members["limit"] == 512
    assert http.post("/predict", json={"text": text, "truncate": True}).status_code == 200


def test_a_bad_row_in_a_list_leaves_its_neighbours_right(http: httpx.Client) -> None:
    bad = {1: f"a {NAN}", 3: f"a {FAIL} b", 4: f"{INF}"}
    texts = [bad.get(row, f"neighbour number {row}") for row in range(8)]
    rows = http.post("/predict", json={"text": texts, "model": STUB}).json()["predictions"]
    assert {row: rows[row]["error"]["code"] for row in bad} == {
        1: "non_finite_output", 3: "model_failed", 4: "non_finite_output",
    }  # fmt: skip
    for row, text in enumerate(texts):
        if row not in bad:
            assert rows[row]["score"] == pytest.approx(stub_score(text), abs=1e-6)


def test_no_bare_nan_stands_in_any_answer(http: httpx.Client) -> None:
    texts = ["good", NAN, INF]
    content = http.post("/predict", json={"text": texts, "model": STUB}).text
    assert not re.search(r"\b(NaN|Infinity)\b[,}\]]", content)
    json.loads(content, parse_constant=pytest.fail)


def test_parallel_calls_never_cut_by_a_neighbours_setting(http: httpx.Client) -> None:
    short, long = "five words are in here", "word " * 600
    cut = http.post("/predict", json={"text": long, "model": STUB, "truncate": True}).json()
    plain = http.post("/predict", json={"text": short, "model": STUB}).json()

    def call(number: int) -> None:
        truncate, text = number % 2 == 0, long if number % 4 < 2 else short
        response = http.post("/predict", json={"text": text, "model": STUB, "truncate": truncate})
        if text == short:
            assert response.json() == plain
        elif truncate:
            assert response.json() == cut
        else:
            problem(response, 422, "text_too_long")

    with ThreadPoolExecutor(16) as pool:
        for _ in range(5):
            list(pool.map(call, range(64)))


# --- metrics


def samples(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_a_thousand_junk_model_names_make_one_series(http: httpx.Client) -> None:
    http.post("/predict", json={"text": "x", "model": "junk"})
    samples(http)
    before = samples(http)
    for number in range(1000):
        assert http.post("/predict", json={"text": "x", "model": f"junk-{number}"}).status_code == 404
    after = samples(http)
    assert set(after) == set(before)
    name = 'twodoor_rows_total{lane="interactive",model="unknown",outcome="unknown_model"}'
    assert after[name] - before[name] == 1000


def test_metrics_tell_rows_and_durations_and_what_is_admitted(http: httpx.Client) -> None:
    before = samples(http)
    http.post("/predict", json={"text": [GOOD, "", f"{NAN}"], "model": STUB})
    http.get("/nowhere")
    after = samples(http)
    for outcome in ("ok", "empty_text", "non_finite_output"):
        name = f'twodoor_rows_total{{lane="interactive",model="{STUB}",outcome="{outcome}"}}'
        assert after[name] == before.get(name, 0) + 1
    count = 'twodoor_http_request_duration_seconds_count{code="200",route="/predict"}'
    assert after[count] == before[count] + 1
    assert after['twodoor_http_request_duration_seconds_count{code="404",route="other"}'] >= 1
    assert "twodoor_admitted_tokens" in after


# --- what surrounds a call


def test_a_request_id_is_echoed_and_a_bad_one_replaced(http: httpx.Client) -> None:
    for given in ("abc-123", "x" * 128):
        for path in ("/predict?text=good", "/nowhere"):
            assert http.post(path, headers={"x-request-id": given}).headers["x-request-id"] == given
    for bad in (b"x" * 129, b"a b", "caf\u00e9".encode(), b"a\tx"):
        made = http.post("/predict", params={"text": "good"}, headers={b"x-request-id": bad}).headers["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{32}", made)


def test_a_long_timeout_is_capped_and_not_refused(http: httpx.Client) -> None:
    response = http.post("/predict", params={"text": "good"}, headers={"x-timeout-ms": "9" * 18})
    assert response.status_code == 200


def test_health_routes_take_get_and_head(http: httpx.Client) -> None:
    assert http.get("/readyz").json() == {"dependencies": {"triton": "up"}}
    assert http.get("/healthz").status_code == 200
    for path in ("/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"):
        got, headed = http.get(path), http.head(path)
        assert (got.status_code, headed.status_code) == (200, 200)
        assert headed.content == b""
        assert headed.headers["content-type"] == got.headers["content-type"]


def test_a_slash_at_the_end_is_404_and_never_a_redirect(http: httpx.Client) -> None:
    for path in ("/predict/", "/healthz/", "/nowhere"):
        problem(http.post(path, json={"text": "x"}), 404, "not_found")


def test_a_wrong_method_is_405_with_allow(http: httpx.Client) -> None:
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
        response = http.request(method, "/predict")
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
    problem(http.get("/predict"), 405, "method_not_allowed")
    response = http.post("/healthz")
    problem(response, 405, "method_not_allowed")
    assert set(response.headers["allow"].replace(" ", "").split(",")) == {"GET", "HEAD"}


def test_the_documentation_has_examples_and_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert {"/predict", "/healthz", "/readyz", "/metrics"} <= set(document["paths"])
    call = document["paths"]["/predict"]["post"]
    for example in call["requestBody"]["content"]["application/json"]["examples"].values():
        assert http.post("/predict", json=example["value"]).status_code == 200
    assert {"404", "413", "415", "422", "503", "504"} <= set(call["responses"])
    page = http.get("/docs").text
    assert not re.search(r"(src|href)=.?https?:", page)


def test_the_text_of_a_query_never_enters_the_log(http: httpx.Client, gateway_process: Gateway) -> None:
    for text in ("unloggable-word", f"unloggable-word {NAN}"):
        http.post("/predict", params={"text": text})
    http.get("/predict", params={"text": "unloggable-word"})
    assert "unloggable" not in gateway_process.log()
