"""The client and `twodoor predict` against the real gateway."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

import twodoor
from tests.parts import ROOT, Gateway
from twodoor import AsyncClient, Client


@pytest.fixture(scope="module")
def url(gateway_process: Gateway) -> str:
    return gateway_process.url


def predict(url: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "twodoor", "predict", *arguments], capture_output=True, text=True, timeout=60,
        check=False, cwd=ROOT, env={**os.environ, "TWODOOR_CLIENT_URL": url},
    )  # fmt: skip


def test_one_text_and_a_list_are_answered(url: str) -> None:
    with Client(url) as client:
        one = client.predict("A wonderful evening.")
        assert one.sentiment == one.label == "positive"
        assert one.score is not None
        assert one.scores is not None
        assert one.score == pytest.approx(one.scores["positive"])
        many = client.predict_many(["A wonderful evening.", "", "What a waste of money."])
    assert (many.model, many.model_version) == ("sentiment_model", "1")
    assert many.request_id
    first, second, third = many.rows
    assert isinstance(first, twodoor.Prediction)
    assert first.score == pytest.approx(one.score, abs=1e-3)
    assert isinstance(second, twodoor.RowFailed)
    assert second.code == "empty_text"
    assert isinstance(third, twodoor.Prediction)
    assert third.label == "negative"


def test_another_model_gives_embeddings(url: str) -> None:
    with Client(url) as client:
        answer = client.predict("A text.", model="embedding_model")
    assert answer.label is None
    assert answer.embedding is not None
    assert len(answer.embedding) == 384


def test_a_text_is_cut_only_when_asked(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(twodoor.RowFailed) as caught:
            client.predict("word " * 2_000)
        assert caught.value.code == "text_too_long"
        assert client.predict("word " * 2_000, truncate=True).label in ("positive", "negative")


def test_the_servers_refusals_are_the_trees_errors(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(twodoor.UnknownModel) as caught:
            client.predict("x", model="no_such_model", request_id="my-id")
        assert (caught.value.code, caught.value.status, caught.value.request_id) == ("unknown_model", 404, "my-id")
        with pytest.raises(twodoor.Refused) as refused:
            client.predict_many([])
        assert refused.value.status == 422


async def test_many_async_callers_share_one_client(url: str) -> None:
    texts = [f"The {n}. day was {'lovely' if n % 2 else 'awful'}." for n in range(64)]
    async with AsyncClient(url) as client:
        answers = await asyncio.gather(*(client.predict(text) for text in texts))
        together = await client.predict_many(texts)
    for alone, row in zip(answers, together.rows, strict=True):
        assert isinstance(row, twodoor.Prediction)
        assert row.label == alone.label
        assert row.score == pytest.approx(alone.score, abs=1e-3)


def test_the_command_prints_lines_or_json(url: str) -> None:
    done = predict(url, "A wonderful evening.", "What a waste of money.")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["positive", "negative"]
    answer = json.loads(predict(url, "A wonderful evening.", "--json").stdout)
    assert answer["model"] == "sentiment_model"
    assert answer["predictions"][0]["sentiment"] == "positive"


def test_the_command_exits_1_for_a_text_or_a_model_without_an_answer(url: str) -> None:
    empty = predict(url, "fine", " ")
    assert empty.returncode == 1
    assert "empty_text" in empty.stdout
    unknown = predict(url, "fine", "--model", "no_such_model")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("twodoor: unknown_model: ")


def test_a_text_whose_bytes_are_no_characters_is_that_rows_error(url: str) -> None:
    done = predict(url, os.fsdecode(b"caf\xe9"), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["predictions"][0]["error"]["code"] == "invalid_unicode"
