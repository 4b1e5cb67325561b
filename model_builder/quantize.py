"""The precisions of a grafted FP32 graph: static INT8 from a table of ranges, FP16, and the calibration itself."""

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from model_builder.graph import QuantizedWeight, constant, prune, sort_nodes

Range = tuple[float, float]

# Seven bits, as in the fetched files: the sum of two U8 x S8 products then fits into 16 bits, where CPUs without VNNI
# would otherwise saturate without a word.
WEIGHT_LIMIT = 64


def quantizable(model: onnx.ModelProto) -> dict[str, str]:
    """Return weight name → activation name of each MatMul whose second factor is a constant matrix."""
    matrices = {item.name for item in model.graph.initializer if len(item.dims) == 2}
    return {
        node.input[1]: node.input[0]
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in matrices
    }


def static_int8(model: onnx.ModelProto, weights: Mapping[str, QuantizedWeight], ranges: Mapping[str, Range]) -> None:
    """Wrap each MatMul with a constant weight in QDQ nodes, in place: U8 activations, S8 weights per column.

    Scales come from ``ranges`` (activation name → min, max), never from the batch, so a row's answer does not depend
    on its neighbours. MatMul outputs stay FP32. ``weights`` gives the integers where they are known; any other weight
    is rounded to its column's largest magnitude. Raises KeyError for an activation without a range.
    """
    graph = model.graph
    arrays = {item.name: item for item in graph.initializer}
    pairs = quantizable(model)
    done: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in pairs:
            activation, weight = node.input[0], node.input[1]
            if activation not in done:
                nodes.extend(_activation_nodes(graph, activation, ranges[activation]))
                done.add(activation)
            known = weights.get(weight) or _round_weight(numpy_helper.to_array(arrays[weight]))
            nodes.append(_weight_node(graph, weight, known))
            node.input[0], node.input[1] = f"{activation}/dequantized", f"{weight}/dequantized"
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    prune(graph)


def _activation_nodes(graph: onnx.GraphProto, name: str, bounds: Range) -> list[onnx.NodeProto]:
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    scale = max((high - low) / 255.0, 1e-9)
    zero = round(-low / scale)
    scale_name = constant(graph, f"{name}/scale", np.array(scale, np.float32))
    zero_name = constant(graph, f"{name}/zero_point", np.array(min(max(zero, 0), 255), np.uint8))
    return [
        helper.make_node("QuantizeLinear", [name, scale_name, zero_name], [f"{name}/quantized"], name=f"{name}/Q"),
        helper.make_node(
            "DequantizeLinear", [f"{name}/quantized", scale_name, zero_name], [f"{name}/dequantized"], name=f"{name}/DQ"
        ),
    ]


def _weight_node(graph: onnx.GraphProto, name: str, weight: QuantizedWeight) -> onnx.NodeProto:
    values = constant(graph, f"{name}/quantized", weight.values)
    scale = constant(graph, f"{name}/scale", weight.scale)
    zero = constant(graph, f"{name}/zero_point", np.zeros(weight.scale.shape, np.int8))
    return helper.make_node(
        "DequantizeLinear", [values, scale, zero], [f"{name}/dequantized"], name=f"{name}/DQ", axis=1
    )


def _round_weight(weight: NDArray[np.float32]) -> QuantizedWeight:
    scale = np.maximum(np.abs(weight).max(axis=0) / WEIGHT_LIMIT, 1e-9).astype(np.float32)
    return QuantizedWeight(np.clip(np.rint(weight / scale), -WEIGHT_LIMIT, WEIGHT_LIMIT).astype(np.int8), scale)


def half(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the model FP16 weights and computation, in place, and return it; inputs and outputs keep their types.

    DequantizeLinear stays FP32 (an INT8 table of word embeddings): it gives FP16 only from opset 19 on.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    converted: onnx.ModelProto = convert_float_to_float16(
        model, keep_io_types=True, disable_shape_infer=True, op_block_list=["DequantizeLinear"]
    )
    sort_nodes(converted.graph)  # the converter puts its casts at the end
    return converted


def observe(model: onnx.ModelProto, rows: Iterable[NDArray[np.int64]], threads: int) -> dict[str, Range]:
    """Run rows of token ids [s] one by one, unpadded, and return the min and max of each activation to quantize."""
    import onnxruntime as ort

    names = sorted(set(quantizable(model).values()))
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    for name in names:
        watched.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    seen: dict[str, Range] = {}
    for ids in rows:
        values = session.run(names, {"input_ids": ids[None], "attention_mask": np.ones_like(ids)[None]})
        for name, value in zip(names, values, strict=True):
            low, high = seen.get(name, (np.inf, -np.inf))
            seen[name] = (min(low, float(value.min())), max(high, float(value.max())))
    return seen
