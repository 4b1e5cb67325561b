"""A user's own model: the same folder as a default one, or one clear line why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import transformers
from google.protobuf import json_format, text_format
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2

import model_builder
from model_builder.__main__ import main
from model_builder.check import pooled
from serving.errors import ConfigError
from serving.models import check_twin, parse_spec
from tests.unit.tiny_models import HIDDEN, classifier_model, hidden_model, write_tokenizer

LABELS = ["bad", "so so", "good"]
TEXTS = ["fine", "not a good film", "a long walk by the sea, told twice and never quite finished"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "own_tokenizer")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "own.onnx")
    return folder / "own.onnx"


def add(repository: Path, model: onnx.ModelProto, tokenizer: Path, **options: Any) -> model_builder.BuiltModel:
    name, task = options.pop("name", "mood"), options.pop("task", "classify")
    file = saved(model, tokenizer.parent)
    return model_builder.add(repository, name, file, tokenizer, task, progress=lambda _: None, **options)


def run(path: Path, texts: list[str], **padding: Any) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "tokenizer")
    encoded = tokenizer(texts, return_tensors="np", **({"padding": True} | padding))
    session = ort.InferenceSession(str(path / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    return np.asarray(
        session.run(None, {item.name: encoded[item.name].astype(np.int64) for item in session.get_inputs()})[0]
    )


def spec_of(path: Path, labels: tuple[str, ...]) -> Any:
    def config(folder: Path) -> dict[str, Any]:
        message = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
        return json_format.MessageToDict(message, preserving_proto_field_name=True)

    spec = parse_spec(config(path), "1", labels)
    check_twin(spec, config(path.parent / spec.bulk_model))
    return spec


def test_a_model_with_token_types_and_three_labels_becomes_one_like_the_default_ones(
    repository: Path, tokenizer: Path
) -> None:
    model = classifier_model(3, token_types=True)
    built = add(repository, model, tokenizer, labels=LABELS)
    spec = spec_of(built.path, tuple(LABELS))
    assert (spec.inputs, spec.output, spec.output_size) == (("input_ids", "attention_mask"), "logits", 3)
    assert spec.max_tokens == 40
    assert (built.path / "labels.txt").read_text() == "bad\nso so\ngood\n"
    assert (repository / "mood_bulk/1/model.onnx").samefile(repository / "mood/1/model.onnx")

    own = transformers.AutoTokenizer.from_pretrained(built.path / "tokenizer")
    ids = own(TEXTS[1], return_tensors="np")["input_ids"].astype(np.int64)
    original = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = original.run(None, {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0})
    assert np.abs(run(built.path, [TEXTS[1]]) - expected).max() < 1e-5
    assert np.abs(run(built.path, TEXTS)[1] - expected[0]).max() < 1e-5

    assert [info.name for info in model_builder.list_models(repository)] == ["mood"]
    assert [result.problems for result in model_builder.verify(repository)] == [()]
    canary = json.loads((built.path / "canary.json").read_text())
    assert set(canary["inputs"]) == {"input_ids", "attention_mask"}
    assert len(canary["output"]["values"]) == 3


def test_a_model_added_without_a_twin_stands_there_once_and_serves_both_lanes(
    repository: Path, tokenizer: Path
) -> None:
    built = add(repository, classifier_model(3), tokenizer, labels=LABELS, has_twin=False)
    assert [path.name for path in repository.iterdir()] == ["mood"]
    config = text_format.Parse((built.path / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    mapping = json_format.MessageToDict(config, preserving_proto_field_name=True)
    spec = parse_spec(mapping, "1", LABELS)
    assert (spec.bulk_model, spec.priority("interactive"), spec.priority("bulk")) == ("mood", 1, 2)
    (checked,) = model_builder.verify(repository)
    assert checked.ok
    assert not any("twin" in line for line in checked.passed)


def test_padding_and_truncation_of_the_users_tokenizer_file_are_reset(repository: Path, tokenizer: Path) -> None:
    built = add(repository, classifier_model(), tokenizer, labels=LABELS)
    own = transformers.AutoTokenizer.from_pretrained(built.path / "tokenizer")
    assert len(own("fine")["input_ids"]) == 3
    assert len(own("fine " * 30)["input_ids"]) == 32


def test_hidden_states_get_pooling_and_length_one(repository: Path, tokenizer: Path) -> None:
    model = hidden_model(token_types=True, opset=12)
    built = add(repository, model, tokenizer, task="embed", name="vectors")
    assert spec_of(built.path, ()).output_size == HIDDEN
    vectors = run(built.path, TEXTS)
    own = transformers.AutoTokenizer.from_pretrained(built.path / "tokenizer")
    encoded = own(TEXTS, return_tensors="np", padding=True)
    ids, mask = encoded["input_ids"].astype(np.int64), encoded["attention_mask"].astype(np.int64)
    original = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (hidden,) = original.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0})
    assert np.abs(vectors - pooled(hidden, mask)).max() < 1e-5


def test_vectors_that_are_pooled_already_stay_as_they_are(repository: Path, tokenizer: Path) -> None:
    built = add(repository, classifier_model(7, output="sentence_embedding"), tokenizer, task="embed", name="vectors")
    spec = spec_of(built.path, ())
    assert (spec.output, spec.output_size) == ("embedding", 7)
    lengths = np.linalg.norm(run(built.path, TEXTS), axis=1)
    assert np.abs(lengths - 1).max() > 0.01


def test_a_classifier_without_labels_gets_numbered_ones(repository: Path, tokenizer: Path) -> None:
    built = add(repository, classifier_model(2), tokenizer)
    assert (built.path / "labels.txt").read_text() == "label_0\nlabel_1\n"


def test_the_command_adds_a_model_with_a_label_file(
    repository: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("bad\nso so\ngood\n\n")
    file = saved(classifier_model(3), tmp_path)
    command = ["--repository", str(repository), "add", "mood", "--onnx", str(file), "--tokenizer", str(tokenizer)]
    assert main([*command, "--task", "classify", "--labels", str(labels)]) == 0
    assert "mood: added" in capsys.readouterr().out
    assert main([*command, "--task", "classify", "--labels", str(labels)]) == 1
    assert "has a model mood already" in capsys.readouterr().err


def _renamed_input() -> onnx.ModelProto:
    model = classifier_model()
    model.graph.input[0].name = "ids"
    model.graph.node[0].input[1] = "ids"
    return model


def _int32_input() -> onnx.ModelProto:
    model = classifier_model()
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT32
    return model


def _fixed_shape() -> onnx.ModelProto:
    model = classifier_model()
    for item in model.graph.input:
        item.type.tensor_type.shape.dim[1].dim_value = 128
    return model


def _foreign_operator() -> onnx.ModelProto:
    model = classifier_model()
    model.opset_import.append(helper.make_opsetid("org.example.ops", 1))
    return model


def _two_outputs() -> onnx.ModelProto:
    model = classifier_model(output="first")
    model.graph.output.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["b", HIDDEN]))
    return model


def _half_output() -> onnx.ModelProto:
    model = classifier_model(output="wide")
    model.graph.node.append(helper.make_node("Cast", ["wide"], ["logits"], to=TensorProto.FLOAT16))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT16, ["b", 3]))
    return model


def _not_a_number() -> onnx.ModelProto:
    model = classifier_model(output="fine")
    model.graph.node.append(helper.make_node("Sub", ["fine", "fine"], ["zero_row"]))
    model.graph.node.append(helper.make_node("Div", ["zero_row", "zero_row"], ["logits"]))
    model.graph.output[0].name = "logits"
    return model


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (_renamed_input, {}, r"inputs are attention_mask, ids; expected input_ids"),
        (_int32_input, {}, "(input input_ids is INT32, expected INT64|not a valid ONNX model)"),
        (_fixed_shape, {}, r"shape \['b', 128\], expected two free dimensions"),
        (_foreign_operator, {}, "operators of org.example.ops"),
        (_two_outputs, {}, "outputs are first, mean: which one"),
        (_half_output, {}, "output logits is float16, expected FP32"),
        (_not_a_number, {}, "NaN or Inf"),
        (hidden_model, {}, r"output last_hidden_state has shape \[2, 3, 64\].* expected \[batch, classes\]"),
        (lambda: classifier_model(1), {}, "1 class, expected two or more"),
        (lambda: _with_opset(9), {}, "opset 9, expected 11 to 21"),
        (lambda: _with_opset(22), {}, "opset 22, expected 11 to 21"),
        (classifier_model, {"labels": ["good", "bad"]}, "2 labels for a model with 3 classes"),
        (classifier_model, {"labels": ["a", "b", "a"]}, "not all different"),
        (hidden_model, {"labels": LABELS, "task": "embed"}, "labels are for classify only"),
        (classifier_model, {"task": "translate"}, "expected classify or embed"),
        (classifier_model, {"name": "../mood"}, "model name '../mood'"),
        (classifier_model, {"name": "mood_bulk"}, "kept for bulk twins"),
        (lambda: classifier_model(positions=16), {}, "fails at 40 tokens, set --max-tokens"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_and_leaves_nothing(
    make: Callable[[], onnx.ModelProto], options: dict[str, Any], reason: str, repository: Path, tokenizer: Path
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        add(repository, make(), tokenizer, **options)
    assert "\n" not in str(caught.value)
    assert not repository.exists() or list(repository.iterdir()) == []
    assert not list(repository.parent.glob(".*building*"))


def _with_opset(opset: int) -> onnx.ModelProto:
    model = classifier_model(2)
    model.opset_import[0].version = opset
    return model


def test_a_shorter_limit_fits_a_short_position_table(repository: Path, tokenizer: Path) -> None:
    built = add(repository, classifier_model(positions=24), tokenizer, max_tokens=20)
    assert spec_of(built.path, ("label_0", "label_1", "label_2")).max_tokens == 20


def test_a_tokenizer_with_more_words_than_the_model_is_refused(repository: Path, tmp_path: Path) -> None:
    wide = write_tokenizer(tmp_path / "wide", extra_words=50)
    with pytest.raises(ConfigError, match="fails on its tokenizer's ids"):
        add(repository, classifier_model(), wide)


def test_files_that_are_not_what_they_should_be_are_named(repository: Path, tokenizer: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model at all")
    with pytest.raises(ConfigError, match=r"broken\.onnx is not a valid ONNX model"):
        model_builder.add(repository, "mood", broken, tokenizer, "classify")
    with pytest.raises(ConfigError, match=r"missing\.onnx cannot be read"):
        model_builder.add(repository, "mood", tmp_path / "missing.onnx", tokenizer, "classify")
    file = saved(classifier_model(), tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        model_builder.add(repository, "mood", file, tmp_path, "classify")
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        model_builder.add(repository, "mood", file, tokenizer, "classify", tmp_path / "missing.txt")


def test_a_tokenizer_that_asks_for_code_of_its_own_is_refused(repository: Path, tokenizer: Path) -> None:
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own.Tokenizer", None]}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="code of its own"):
        add(repository, classifier_model(), tokenizer)


def test_an_answer_that_depends_on_padding_is_warned_of(repository: Path, tokenizer: Path) -> None:
    model = classifier_model()
    nodes = list(model.graph.node)
    cast = next(node for node in nodes if node.op_type == "Cast")
    cast.input[0] = "all_ones"  # the mask is left out: padding counts as words
    del model.graph.node[:]
    one = helper.make_tensor("value", TensorProto.INT64, [1], [1])
    model.graph.node.append(helper.make_node("Shape", ["input_ids"], ["ids_shape"]))
    model.graph.node.append(helper.make_node("ConstantOfShape", ["ids_shape"], ["all_ones"], value=one))
    model.graph.node.extend(nodes)
    lines: list[str] = []
    file = saved(model, tokenizer.parent)
    model_builder.add(repository, "mood", file, tokenizer, "classify", progress=lines.append)
    assert any("warning: answers change by up to" in line for line in lines)
    assert "largest change with padding" in (repository / "mood" / "MODEL_CARD.md").read_text()


def test_a_version_has_the_models_labels_and_tokenizer_unless_it_brings_others(
    repository: Path, tokenizer: Path, tmp_path: Path
) -> None:
    add(repository, classifier_model(3), tokenizer, labels=LABELS)
    add(repository, classifier_model(3, seed=2), tokenizer, version="2")
    other = write_tokenizer(tmp_path / "other", extra_words=0, max_length=20)
    (other / "vocab.txt").write_text("more\n")
    add(repository, classifier_model(3, seed=3), other, version="3", labels=["low", "mid", "high"])
    folder = repository / "mood"
    assert sorted(path.name for path in (folder / "2").iterdir()) == ["canary.json", "model.onnx"]
    assert (folder / "3" / "labels.txt").read_text() == "low\nmid\nhigh\n"
    assert (folder / "3" / "tokenizer" / "vocab.txt").is_file()
    (result,) = model_builder.verify(repository)
    assert result.ok, result.problems


@pytest.mark.parametrize(
    ("version", "classes", "reason"),
    [("1", 3, "is there already"), ("two", 3, "a whole number"), ("2", 4, r"gives logits \[4\]")],
)
def test_a_version_that_is_none_of_the_model_is_refused(
    repository: Path, tokenizer: Path, version: str, classes: int, reason: str
) -> None:
    add(repository, classifier_model(3), tokenizer, labels=LABELS)
    with pytest.raises(ConfigError, match=reason):
        add(repository, classifier_model(classes), tokenizer, version=version)
    assert [path.name for path in (repository / "mood").iterdir() if path.name.isdigit()] == ["1"]
