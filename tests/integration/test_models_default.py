"""The default models, built from the fetched files: what stands in the repository, and what a broken one is called."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import transformers
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

import model_builder
from model_builder import sources
from model_builder.__main__ import main
from model_builder.check import pooled
from serving.errors import ConfigError
from serving.models import check_twin, parse_spec, tokenizer_sha256

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".models-cache"
NAMES = ("sentiment_model", "embedding_model")
TEXTS = ["a quietly funny film", "dull", "the longest of the three sentences , and the only one with a comma"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models") / "repository"
    model_builder.build(repository, CACHE, progress=lambda _: None)
    return repository


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    """The built repository as a copy that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "repository"))


def session(path: Path) -> Any:
    return ort.InferenceSession(str(path / "1" / "model.onnx"), providers=["CPUExecutionProvider"])


def feed(path: Path, texts: list[str], prefix: str = "") -> dict[str, np.ndarray]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "tokenizer")
    encoded = tokenizer([prefix + text for text in texts], padding=True, return_tensors="np")
    return {name: encoded[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def content(repository: Path) -> dict[str, str]:
    return {
        file.relative_to(repository).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in repository.rglob("*")
        if file.is_file()
    }


def triton_config(path: Path) -> dict[str, Any]:
    message = text_format.Parse((path / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def test_both_models_and_their_twins_stand_there_whole(built: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == sorted([*NAMES, *(f"{name}_bulk" for name in NAMES)])
    for name in NAMES:
        first, twin = built / name, built / f"{name}_bulk"
        for file in ("config.pbtxt", "1/model.onnx", "canary.json", "MODEL_CARD.md", "tokenizer/tokenizer.json"):
            assert (first / file).is_file()
        assert (twin / "1" / "model.onnx").samefile(first / "1" / "model.onnx")
        assert json.loads((twin / "canary.json").read_text()) == json.loads((first / "canary.json").read_text())
    assert (built / "sentiment_model" / "labels.txt").read_text() == "negative\npositive\n"
    assert not list(built.parent.glob(".*building*"))


@pytest.mark.parametrize(
    ("name", "output", "size"), [("sentiment_model", "logits", 2), ("embedding_model", "embedding", 384)]
)
def test_the_graph_has_exactly_the_promised_inputs_and_output(built: Path, name: str, output: str, size: int) -> None:
    run = session(built / name)
    assert [(i.name, i.type, len(i.shape)) for i in run.get_inputs()] == [
        ("input_ids", "tensor(int64)", 2),
        ("attention_mask", "tensor(int64)", 2),
    ]
    assert [(o.name, o.type, o.shape[1]) for o in run.get_outputs()] == [(output, "tensor(float)", size)]
    model = onnx.load(built / name / "1" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {item.domain for item in model.opset_import} == {""}


@pytest.mark.parametrize("name", NAMES)
def test_the_doors_accept_both_configs(built: Path, name: str) -> None:
    labels = ("negative", "positive") if name == "sentiment_model" else ()
    spec = parse_spec(triton_config(built / name), "1", labels)
    check_twin(spec, triton_config(built / spec.bulk_model))
    assert spec.tokenizer_sha256 == tokenizer_sha256(built / name / "tokenizer")
    assert spec.max_tokens == {"sentiment_model": 512, "embedding_model": 256}[name]
    assert spec.prompt_prefix == {"sentiment_model": "query: ", "embedding_model": ""}[name]


def test_the_embedding_is_numpys_mean_over_the_real_tokens_of_the_fetched_model(built: Path) -> None:
    fetched = sources.fetch(sources.MINILM_L6, CACHE, lambda _: None)
    original = ort.InferenceSession(str(fetched.onnx), providers=["CPUExecutionProvider"])
    inputs = feed(built / "embedding_model", TEXTS)
    (hidden,) = original.run(None, {**inputs, "token_type_ids": np.zeros_like(inputs["input_ids"])})
    (vectors,) = session(built / "embedding_model").run(None, inputs)
    assert np.abs(vectors - pooled(hidden, inputs["attention_mask"])).max() < 1e-5
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)


def test_the_sentiment_model_knows_good_from_bad(built: Path) -> None:
    texts = ["a wonderful, moving film", "a dreadful waste of two hours"]
    (logits,) = session(built / "sentiment_model").run(None, feed(built / "sentiment_model", texts, "query: "))
    assert logits.argmax(axis=1).tolist() == [1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_loads_without_a_network_and_carries_no_state(
    built: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the tokenizer asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    tokenizer = transformers.AutoTokenizer.from_pretrained(built / name / "tokenizer")
    assert tokenizer.is_fast
    assert tokenizer.pad_token_id == 0
    long = tokenizer("word " * 600)
    assert list(long) == ["input_ids", "attention_mask"]
    assert len(long["input_ids"]) == 602
    assert len(tokenizer("word")["input_ids"]) == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_canary_is_what_the_model_answers(built: Path, name: str) -> None:
    canary = json.loads((built / name / "canary.json").read_text())
    row = {key: np.array([value], np.int64) for key, value in canary["inputs"].items()}
    (values,) = session(built / name).run([canary["output"]["name"]], row)
    assert np.abs(values[0] - canary["output"]["values"]).max() < 1e-3


def test_a_build_with_nothing_to_do_changes_nothing_and_takes_a_moment(built: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    started = time.monotonic()
    answers = model_builder.build(built, CACHE, progress=lambda _: None)
    assert time.monotonic() - started < 5
    assert [answer.changed for answer in answers] == [False, False]
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == before


def test_the_same_input_gives_the_same_bytes_in_another_process(built: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "model_builder",
        "--repository",
        str(tmp_path / "again"),
        "build",
        "--cache",
        str(CACHE),
    ]
    subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, timeout=100, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert content(tmp_path / "again") == content(built)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_another_precision_has_the_same_names_and_nearly_the_same_answers(
    built: Path, tmp_path: Path, precision: str
) -> None:
    (answer,) = model_builder.build(tmp_path / "other", CACHE, precision, ["sentiment_model"], lambda _: None)
    assert answer.precision == precision
    ours, other = session(built / "sentiment_model"), session(answer.path)
    for kind in ("get_inputs", "get_outputs"):
        assert [(i.name, i.type) for i in getattr(other, kind)()] == [(i.name, i.type) for i in getattr(ours, kind)()]
    inputs = feed(built / "sentiment_model", TEXTS, "query: ")
    assert np.abs(other.run(None, inputs)[0] - ours.run(None, inputs)[0]).max() < 0.5
    same, different = triton_config(built / "sentiment_model"), triton_config(answer.path)
    # What is warmed depends on the device a precision is for.
    assert {**different, "model_warmup": None} == {**same, "model_warmup": None}


def test_another_precision_replaces_the_model_and_the_twin(copied: Path) -> None:
    (answer,) = model_builder.build(copied, CACHE, "fp32", ["sentiment_model"], lambda _: None)
    assert answer.changed
    assert (copied / "sentiment_model_bulk/1/model.onnx").samefile(copied / "sentiment_model/1/model.onnx")
    assert (copied / "sentiment_model/1/model.onnx").stat().st_size > 80e6
    assert all(result.ok for result in model_builder.verify(copied))


def test_a_build_that_was_killed_leaves_nothing_behind_and_the_next_one_heals(copied: Path) -> None:
    left = copied.parent / ".repository.building" / "sentiment_model" / "1"
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"half")
    shutil.rmtree(copied / "sentiment_model")
    answers = model_builder.build(copied, CACHE, models=["sentiment_model"], progress=lambda _: None)
    assert [answer.changed for answer in answers] == [True]
    assert not (copied.parent / ".repository.building").exists()
    assert all(result.ok for result in model_builder.verify(copied))


def test_two_builds_of_one_repository_do_not_meet(copied: Path) -> None:
    from model_builder.folder import staging

    with staging(copied), pytest.raises(ConfigError, match="another build is at work"):
        model_builder.build(copied, CACHE, progress=lambda _: None)


def test_the_list_names_models_but_no_twins(built: Path) -> None:
    found = {info.name: info for info in model_builder.list_models(built)}
    assert sorted(found) == sorted(NAMES)
    assert found["sentiment_model"].labels == ("negative", "positive")
    assert (found["sentiment_model"].precision, found["embedding_model"].precision) == ("int8", "fp32")
    assert found["embedding_model"].bulk_model == "embedding_model_bulk"


def test_verify_finds_nothing_wrong_with_a_fresh_build(built: Path) -> None:
    results = model_builder.verify(built)
    assert [(result.name, result.problems) for result in results] == [(name, ()) for name in sorted(NAMES)]


@pytest.mark.parametrize(
    ("file", "change", "complaint"),
    [
        ("sentiment_model/tokenizer/tokenizer.json", b"{}", "tokenizer/tokenizer.json has other content"),
        ("sentiment_model/labels.txt", b"positive\nnegative\n", "labels.txt has other content"),
        ("sentiment_model/config.pbtxt", b'name: "sentiment_model"\n', "config.pbtxt has other content"),
        ("sentiment_model/canary.json", None, "canary.json is missing"),
        ("sentiment_model_bulk/config.pbtxt", b"", "sentiment_model_bulk: config.pbtxt has other content"),
        ("sentiment_model_bulk/build.json", None, "the bulk twin sentiment_model_bulk is missing"),
        ("sentiment_model/1/extra.onnx", b"x", "1/extra.onnx is not part of the build"),
    ],
)
def test_verify_says_what_was_changed(copied: Path, file: str, change: bytes | None, complaint: str) -> None:
    if change is None:
        (copied / file).unlink()
    else:
        (copied / file).write_bytes(change)
    (result,) = model_builder.verify(copied, models=["sentiment_model"])
    assert any(complaint in problem for problem in result.problems)


def test_a_build_repairs_what_verify_complained_of(copied: Path) -> None:
    (copied / "sentiment_model" / "labels.txt").write_text("changed\n")
    model_builder.build(copied, CACHE, progress=lambda _: None)
    assert all(result.ok for result in model_builder.verify(copied))


def test_the_command_answers_with_exit_codes(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repository", str(built), "list"]) == 0
    assert "sentiment_model\tclassify\tint8" in capsys.readouterr().out
    assert main(["--repository", str(tmp_path / "empty"), "verify"]) == 1
    assert capsys.readouterr().err.startswith("error: no model in ")
    assert main(["--repository", str(tmp_path / "empty"), "build", "no_such_model"]) == 1
    assert "no default model 'no_such_model'" in capsys.readouterr().err


def test_importing_the_builder_brings_no_onnx() -> None:
    code = "import sys, model_builder; sys.exit(any(m in sys.modules for m in ('onnx', 'onnxruntime', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
