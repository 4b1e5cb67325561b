"""Grafts and quantization on graphs small enough to compute by hand."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from model_builder import check, graph, quantize
from model_builder.run import Runner
from serving.errors import ConfigError
from tests.unit.tiny_models import HIDDEN, VOCABULARY, hidden_model

ROWS = [np.array(ids, np.int64) for ids in ([2, 7, 3], [2, 9, 8, 7, 3], [2, 4, 4, 4, 4, 4, 4, 3])]


def grafted(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph.fix_inputs(copy)
    graph.graft_embedding(copy, "last_hidden_state")
    return graph.finish(copy, "test")


def two_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph.fix_inputs(copy)
    return copy


def test_the_grafted_embedding_is_plain_numpys_and_of_length_one() -> None:
    model = hidden_model()
    worst = check.compare(two_inputs(model), grafted(model), ROWS, None, 1)
    assert worst < 1e-6
    lengths = np.linalg.norm(Runner(grafted(model).SerializeToString(), 1)(ROWS), axis=1)
    assert lengths == pytest.approx(1.0, abs=1e-5)


def test_a_graft_over_the_wrong_tensor_is_found_by_the_comparison() -> None:
    model, wrong = hidden_model(), hidden_model(seed=1)
    with pytest.raises(ConfigError, match="differs from plain NumPy"):
        check.compare(two_inputs(model), grafted(wrong), ROWS, None, 1)


def test_what_stands_under_the_padding_does_not_reach_the_embedding() -> None:
    run = Runner(grafted(hidden_model()).SerializeToString(), 1)
    assert run([ROWS[0]], 3)[0] == pytest.approx(run([ROWS[0]], 64)[0], abs=1e-6)


def test_a_row_without_any_token_gives_zeros_not_nan() -> None:
    import onnxruntime as ort

    session = ort.InferenceSession(grafted(hidden_model()).SerializeToString(), providers=["CPUExecutionProvider"])
    zeros = np.zeros((1, 4), np.int64)
    (vector,) = session.run(None, {"input_ids": zeros, "attention_mask": zeros})
    assert np.array_equal(vector, np.zeros((1, HIDDEN), np.float32))


def test_token_types_are_no_input_any_more_and_count_as_zeros() -> None:
    model = hidden_model(token_types=True)
    fixed = two_inputs(model)
    assert [item.name for item in fixed.graph.input] == ["input_ids", "attention_mask"]
    import onnxruntime as ort

    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ids = ROWS[1][None]
    (before,) = session.run(None, {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0})
    assert np.array_equal(before, Runner(fixed.SerializeToString(), 1)([ROWS[1]]))


def test_dequantizing_gives_one_matmul_and_the_integers_that_were_fetched(tmp_path: Path) -> None:
    onnx.save(hidden_model(), tmp_path / "float.onnx")
    quantize_dynamic(
        tmp_path / "float.onnx",
        tmp_path / "int8.onnx",
        op_types_to_quantize=["MatMul"],
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    model = onnx.load(tmp_path / "int8.onnx")
    assert "MatMulInteger" in {node.op_type for node in model.graph.node}
    weights = graph.dequantize(model)
    kinds = {node.op_type for node in model.graph.node}
    assert not kinds & {"MatMulInteger", "DynamicQuantizeLinear"}
    (name,) = weights
    restored = next(numpy_helper.to_array(item) for item in model.graph.initializer if item.name == name)
    assert np.array_equal(restored, weights[name].values * weights[name].scale)
    before = Runner(two_inputs(hidden_model()).SerializeToString(), 1)(ROWS)
    after = Runner(two_inputs(model).SerializeToString(), 1)(ROWS)
    assert np.abs(before - after).max() < 0.05


def test_static_int8_gives_a_row_the_same_answer_whatever_its_neighbours() -> None:
    model = grafted(hidden_model())
    ranges = quantize.observe(model, ROWS, 1)
    full = Runner(model.SerializeToString(), 1)(ROWS)
    quantize.static_int8(model, {}, ranges)
    assert "QuantizeLinear" in {node.op_type for node in model.graph.node}
    run = Runner(graph.finish(model, "test").SerializeToString(), 1)
    together = run(ROWS, 40)
    assert np.abs(together - full).max() < 0.05
    for index, row in enumerate(ROWS):
        assert run([row])[0] == pytest.approx(together[index], abs=1e-6)


def test_an_activation_without_a_range_is_no_guess() -> None:
    with pytest.raises(KeyError):
        quantize.static_int8(grafted(hidden_model()), {}, {})


def test_fp16_keeps_the_types_of_inputs_and_outputs() -> None:
    model = grafted(hidden_model())
    full = Runner(model.SerializeToString(), 1)(ROWS)
    size = model.ByteSize()
    small = graph.finish(quantize.half(model), "test")
    assert [item.type.tensor_type.elem_type for item in small.graph.output] == [TensorProto.FLOAT]
    assert {item.type.tensor_type.elem_type for item in small.graph.input} == {TensorProto.INT64}
    assert small.ByteSize() < 0.75 * size
    assert np.abs(Runner(small.SerializeToString(), 1)(ROWS) - full).max() < 0.01


def test_pruning_keeps_what_a_subgraph_reads() -> None:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["kept"], ["out_then"])], "then", [],
        [helper.make_tensor_value_info("out_then", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Identity", ["kept"], ["out_else"])], "else", [],
        [helper.make_tensor_value_info("out_else", TensorProto.FLOAT, [1])],
    )  # fmt: skip
    whole = helper.make_graph(
        [helper.make_node("If", ["flag"], ["out"], then_branch=branch, else_branch=other)], "whole",
        [helper.make_tensor_value_info("flag", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1])],
        [numpy_helper.from_array(np.ones(1, np.float32), name) for name in ("kept", "dropped")],
    )  # fmt: skip
    graph.prune(whole)
    assert [item.name for item in whole.initializer] == ["kept"]


def test_the_vocabulary_of_the_tiny_model_covers_the_rows() -> None:
    assert max(int(row.max()) for row in ROWS) < VOCABULARY
