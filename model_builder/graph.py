"""Surgery on ONNX graphs: undo dynamic quantization, fix the inputs, graft pooling, L2 norm and a head.

Shapes: b rows, s tokens, h hidden units, c classes. Nothing here reads data or writes files.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, version_converter

from serving.errors import ConfigError

OPSET = 17
IR_VERSION = 10
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPE_IDS = "token_type_ids"  # noqa: S105 - a tensor's name
LOGITS = "logits"
EMBEDDING = "embedding"


@dataclass(frozen=True)
class Head:
    """A linear classifier over the L2-normed mean-pooled embedding: logits = embedding @ weight + bias."""

    weight: NDArray[np.float32]  # [h, c]
    bias: NDArray[np.float32]  # [c]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as it was fetched: INT8 [k, n] with one scale per column and zero point 0."""

    values: NDArray[np.int8]
    scale: NDArray[np.float32]


def constant(graph: onnx.GraphProto, name: str, value: NDArray[np.generic]) -> str:
    """Add an initializer and return its name."""
    graph.initializer.append(numpy_helper.from_array(np.array(value, order="C"), name))
    return name


def dequantize(model: onnx.ModelProto) -> dict[str, QuantizedWeight]:
    """Turn each DynamicQuantizeLinear, MatMulInteger, Cast, Mul into one MatMul with FP32 weights, in place.

    Returns the INT8 weights by the name of the new FP32 initializer, so that a static INT8 model can keep the very
    integers that were fetched. A weight with a zero point other than 0 is not in the answer. Raises ConfigError for a
    MatMulInteger of another pattern.
    """
    graph = model.graph
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    producers = {name: node for node in graph.node for name in node.output}
    arrays = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    kept: dict[str, QuantizedWeight] = {}
    replaced: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        if node.op_type != "MatMulInteger":
            continue
        quantizer = producers[node.input[0]]
        if quantizer.op_type != "DynamicQuantizeLinear":
            raise ConfigError(f"{node.name}: its input comes from {quantizer.op_type}, not from DynamicQuantizeLinear")
        (cast,) = consumers[node.output[0]]
        (scaled,) = consumers[cast.output[0]]
        scales = producers[next(name for name in scaled.input if name != cast.output[0])]
        scale = arrays[next(name for name in scales.input if name in arrays)].astype(np.float32)
        values, zero = arrays[node.input[1]], arrays[node.input[3]]
        name = constant(
            graph,
            node.input[1].removesuffix("_quantized"),
            (values.astype(np.float32) - zero.astype(np.float32)) * scale,
        )
        if not zero.any() and values.dtype == np.int8 and scale.ndim == 1:
            kept[name] = QuantizedWeight(values, scale)
        output = scaled.output[0]
        replaced[output] = helper.make_node(
            "MatMul", [quantizer.input[0], name], [output], name=output.removesuffix("_output_0")
        )
    nodes = [replaced.get(node.output[0], node) for node in graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    prune(graph)
    return kept


def prune(graph: onnx.GraphProto) -> None:
    """Drop nodes and initializers no output depends on."""
    needed = {item.name for item in graph.output}
    nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if any(name in needed for name in node.output):
            nodes.append(node)
            needed.update(name for name in node.input if name)
            needed.update(_names_in_subgraphs(node))
    arrays = [item for item in graph.initializer if item.name in needed]
    shapes = [item for item in graph.value_info if item.name in needed]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(reversed(nodes))
    graph.initializer.extend(arrays)
    graph.value_info.extend(shapes)


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Put each node behind those whose outputs it reads; nodes that may stay in place do."""
    makers = {name: node for node in graph.node for name in node.output}
    ordered: list[onnx.NodeProto] = []
    placed: set[str] = set()
    waiting = list(reversed(graph.node))
    while waiting:
        node = waiting[-1]
        if node.output[0] in placed:
            waiting.pop()
            continue
        reads = [*node.input, *_names_in_subgraphs(node)]
        missing = [makers[name] for name in reads if name in makers and makers[name].output[0] not in placed]
        if missing:
            waiting.extend(missing)
            continue
        ordered.append(waiting.pop())
        placed.add(node.output[0])
    del graph.node[:]
    graph.node.extend(ordered)


def _names_in_subgraphs(node: onnx.NodeProto) -> Iterable[str]:
    for attribute in node.attribute:
        for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            for inner_node in inner.node:
                yield from inner_node.input
                yield from _names_in_subgraphs(inner_node)


def to_opset(model: onnx.ModelProto, opset: int = OPSET) -> onnx.ModelProto:
    """Convert to the given default-domain opset; a newer model stays as it is. Raises what onnx raises."""
    current = next(item.version for item in model.opset_import if item.domain in ("", "ai.onnx"))
    if current >= opset:
        return model
    converted: onnx.ModelProto = version_converter.convert_version(model, opset)
    return converted


def fix_inputs(model: onnx.ModelProto) -> None:
    """Leave exactly input_ids and attention_mask INT64 [b, s] as inputs; token types become zeros inside the graph."""
    graph = model.graph
    names = [item.name for item in graph.input]
    if TOKEN_TYPE_IDS in names:
        shape = helper.make_node("Shape", [INPUT_IDS], ["twodoor/shape"], name="twodoor/Shape")
        zeros = helper.make_node(
            "ConstantOfShape", ["twodoor/shape"], [TOKEN_TYPE_IDS], name="twodoor/TokenTypes",
            value=helper.make_tensor("value", TensorProto.INT64, [1], [0]),
        )  # fmt: skip
        nodes = [shape, zeros, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
    del graph.input[:]
    for name in (INPUT_IDS, ATTENTION_MASK):
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]))


def graft_embedding(model: onnx.ModelProto, hidden: str, name: str = EMBEDDING) -> None:
    """Put masked mean pooling and L2 norm behind ``hidden`` FP32 [b, s, h]; the output becomes ``name`` [b, h]."""
    graph = model.graph
    width = _last_dim(graph, hidden)
    axis_1 = constant(graph, "twodoor/axis_1", np.array([1], np.int64))
    tiny = constant(graph, "twodoor/tiny", np.array(1e-12, np.float32))
    one = constant(graph, "twodoor/one", np.array(1.0, np.float32))
    node = helper.make_node
    graph.node.extend(
        [
            node("Cast", [ATTENTION_MASK], ["twodoor/mask"], name="twodoor/Mask", to=TensorProto.FLOAT),
            node("Unsqueeze", ["twodoor/mask", axis_1], ["twodoor/mask_row"], name="twodoor/MaskRow"),
            # [b, 1, s] @ [b, s, h]: the sum over real tokens without a [b, s, h] product in between.
            node("MatMul", ["twodoor/mask_row", hidden], ["twodoor/sum_row"], name="twodoor/Sum"),
            node("Squeeze", ["twodoor/sum_row", axis_1], ["twodoor/sum"], name="twodoor/SumRow"),
            node("ReduceSum", ["twodoor/mask", axis_1], ["twodoor/tokens"], name="twodoor/Tokens", keepdims=1),
            node("Max", ["twodoor/tokens", one], ["twodoor/divisor"], name="twodoor/Divisor"),
            node("Div", ["twodoor/sum", "twodoor/divisor"], ["twodoor/mean"], name="twodoor/Mean"),
            # Spelled out: ReduceL2 takes its axes as an attribute up to opset 17 and as an input from 18 on.
            node("Mul", ["twodoor/mean", "twodoor/mean"], ["twodoor/squares"], name="twodoor/Squares"),
            node(
                "ReduceSum", ["twodoor/squares", axis_1], ["twodoor/square_sum"], name="twodoor/SquareSum", keepdims=1
            ),
            node("Sqrt", ["twodoor/square_sum"], ["twodoor/norm"], name="twodoor/Norm"),
            node("Max", ["twodoor/norm", tiny], ["twodoor/safe_norm"], name="twodoor/SafeNorm"),
            node("Div", ["twodoor/mean", "twodoor/safe_norm"], [name], name="twodoor/Normed"),
        ]
    )
    set_output(graph, name, width)


def graft_head(model: onnx.ModelProto, head: Head) -> None:
    """Put a linear head behind the embedding; the output becomes ``logits`` FP32 [b, c]."""
    graph = model.graph
    weight = constant(graph, "twodoor/head_weight", head.weight)
    bias = constant(graph, "twodoor/head_bias", head.bias)
    graph.node.append(helper.make_node("Gemm", [EMBEDDING, weight, bias], [LOGITS], name="twodoor/Head"))
    set_output(graph, LOGITS, int(head.bias.shape[0]))


def set_output(graph: onnx.GraphProto, name: str, width: int | str) -> None:
    """Make ``name`` FP32 [b, width] the graph's only output."""
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]))
    prune(graph)


def rename_output(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a graph output; every node that reads or writes it follows."""
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
    for item in graph.output:
        if item.name == old:
            item.name = new


def dims(item: onnx.ValueInfoProto) -> Sequence[int | str]:
    """Return a value's dims: a number, a symbol, or "" where nothing is known."""
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in item.type.tensor_type.shape.dim]


def _last_dim(graph: onnx.GraphProto, name: str) -> int | str:
    known = next((dims(item) for item in graph.output if item.name == name), ())
    return known[-1] if known else "hidden"


def finish(model: onnx.ModelProto, description: str) -> onnx.ModelProto:
    """Set what the file says of itself and check it; raises onnx.checker.ValidationError."""
    model.producer_name = "twodoor.model_builder"
    model.producer_version = ""
    # The newest form the ONNX Runtime of the supported Triton reads; onnx itself would write a newer one.
    model.ir_version = min(max(model.ir_version, 8), IR_VERSION)
    model.doc_string = description
    model.graph.name = "twodoor"
    del model.metadata_props[:]
    for node in model.graph.node:
        node.doc_string = ""
    for array in model.graph.initializer:
        array.doc_string = ""
    onnx.checker.check_model(model)
    return model
