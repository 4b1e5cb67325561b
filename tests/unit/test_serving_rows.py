"""JSON, texts, answers and deadlines: the rules both doors share."""

import json
import math
import time

import numpy as np
import pytest

from serving.codec import decode_json, encode_json
from serving.deadline import Deadline
from serving.errors import DeadlineExceeded, InvalidJson, InvalidUnicode, ModelRefused, NonFiniteOutput
from serving.models import parse_spec
from serving.postprocess import Classification, Embedding, render
from serving.preprocess import check_text
from serving.triton_client import translate
from tests.unit.test_serving_models import LABELS, config


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{", InvalidJson),
        (b"NaN", InvalidJson),
        (b'{"a": Infinity}', InvalidJson),
        (b"[" * 100_000, InvalidJson),
        (b"1" * 5_000, InvalidJson),
        (b'"\xff"', InvalidUnicode),
        (b'"\xed\xa0\x80"', InvalidUnicode),
        (b"", InvalidJson),
    ],
)
def test_what_is_not_json_is_refused(body: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_json(body)


def test_an_escaped_lone_surrogate_is_json_and_the_rows_own_error() -> None:
    text = decode_json(b'{"text": "a\\ud800"}')["text"]
    assert getattr(check_text(text, 100), "code", None) == "invalid_unicode"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_line_of_ours_is_one_line_for_every_reader(separator: str) -> None:
    line = encode_json({"a": f"x{separator}y"})
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"a": f"x{separator}y"}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_text"),
        (" \n\t", "empty_text"),
        (None, "invalid_row"),
        (5, "invalid_row"),
        (True, "invalid_row"),
        ("x" * 101, "row_too_large"),
        ("fine", None),
        ("مرحبا 🚀 \x00", None),
    ],
)
def test_a_text_is_checked_before_it_is_tokenized(text: object, code: str | None) -> None:
    assert getattr(check_text(text, 100), "code", None) == code


def test_probabilities_sum_to_one_and_a_sentiments_score_is_that_of_positive() -> None:
    spec = parse_spec(config(), "1", LABELS)
    good, bad = render(spec, np.array([[-1, 1], [3, -3]], dtype=np.float32))
    assert isinstance(good, Classification)
    assert isinstance(bad, Classification)
    assert (good.label, bad.label) == ("positive", "negative")
    assert good.score == pytest.approx(1 / (1 + math.exp(-2)))
    assert bad.score == pytest.approx(1 / (1 + math.exp(6)))
    assert sum(bad.scores.values()) == pytest.approx(1)
    assert bad.as_json()["sentiment"] == "negative"


def test_another_classifiers_score_is_that_of_its_label() -> None:
    spec = parse_spec(config(), "1", ["no", "yes"])
    (answer,) = render(spec, np.array([[3, -3]], dtype=np.float32))
    assert isinstance(answer, Classification)
    assert answer.score == pytest.approx(answer.scores["no"])
    assert "sentiment" not in answer.as_json()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_that_rows_error(value: float) -> None:
    spec = parse_spec(
        config(parameters={"task": {"string_value": "embed"}, "max_tokens": {"string_value": "8"}}), "1", []
    )
    first, second = render(spec, np.array([[1, 2], [1, value]], dtype=np.float32))
    assert isinstance(first, Embedding)
    assert isinstance(second, NonFiniteOutput)


def test_large_logits_do_not_overflow() -> None:
    spec = parse_spec(config(), "1", LABELS)
    (answer,) = render(spec, np.array([[-3e38, 3e38]], dtype=np.float32))
    assert isinstance(answer, Classification)
    assert answer.score == 1.0


def test_a_deadline_converts_its_units_in_one_place() -> None:
    deadline = Deadline(time.monotonic() + 2.0)
    assert 1.5 < deadline.remaining_s() <= 2.0
    assert 1_500_000 < deadline.queue_timeout_us() <= 2_000_000


def test_a_deadline_that_passed_says_so() -> None:
    with pytest.raises(DeadlineExceeded):
        Deadline.after_ms(-1).remaining_s()


@pytest.mark.parametrize(
    ("status", "message", "code", "retriable"),
    [
        ("StatusCode.UNAVAILABLE", "Exceeds maximum queue size", "overloaded", True),
        ("StatusCode.UNAVAILABLE", "Request timeout expired", "deadline_exceeded", True),
        ("StatusCode.UNAVAILABLE", "failed to connect to all addresses", "dependency_down", True),
        ("StatusCode.INTERNAL", "Stub process 'm_0_0' is not healthy.", "dependency_down", True),
        ("StatusCode.NOT_FOUND", "Request for unknown model: 'm' is not found", "unknown_model", False),
        ("StatusCode.UNAVAILABLE", "Request for unknown model: 'm' has no available versions", "dependency_down", True),
        ("StatusCode.INVALID_ARGUMENT", "unexpected shape for input", "model_failed", False),
        ("StatusCode.INTERNAL", "secret path /opt/x", "model_failed", False),
    ],
)
def test_tritons_answers_are_told_apart_and_its_words_stay_inside(
    status: str, message: str, code: str, retriable: bool
) -> None:
    error = translate(status, message)
    assert (error.code, error.retriable) == (code, retriable)
    assert message not in str(error)


def test_only_an_invalid_argument_is_blamed_on_the_row_without_asking_the_canary() -> None:
    assert isinstance(translate("StatusCode.INVALID_ARGUMENT", "unexpected shape"), ModelRefused)
    assert not isinstance(translate("StatusCode.RESOURCE_EXHAUSTED", "memory quota exceeded"), ModelRefused)
