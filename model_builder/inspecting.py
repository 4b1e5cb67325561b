"""Look at a user's ONNX model: do its inputs and outputs fit, and does it run on its tokenizer's ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from model_builder import graph
from model_builder.config import Task
from model_builder.run import Runner
from model_builder.tokens import Encoder
from serving.errors import ConfigError

# From 11 on onnx converts; the ONNX Runtime of the supported Triton reads up to 21.
MIN_OPSET, MAX_OPSET = 11, 21
PROBE_TEXTS = ("fine", "not as bad as people say", "a long walk by the sea , told twice and never quite finished")
_DOMAINS = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}
_PREFERRED: dict[Task, tuple[str, ...]] = {
    "classify": ("logits",),
    "embed": ("sentence_embedding", "embedding", "last_hidden_state", "token_embeddings"),
}


@dataclass(frozen=True)
class Shape:
    """The output to use: its name, its rank (2 or 3) and the size of its last dimension."""

    output: str
    rank: int
    width: int


def check_opset(model: onnx.ModelProto) -> None:
    """Raise ConfigError unless the supported Triton knows the model's operators."""
    foreign = sorted({item.domain for item in model.opset_import} - _DOMAINS)
    if foreign:
        raise ConfigError(f"the model uses operators of {foreign[0]}, which ONNX Runtime does not bring")
    opset = next((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), None)
    if opset is None or not MIN_OPSET <= opset <= MAX_OPSET:
        raise ConfigError(f"the model has opset {opset}, expected {MIN_OPSET} to {MAX_OPSET}: export it again")


def check_inputs(model: onnx.ModelProto) -> None:
    """Raise ConfigError unless the inputs are input_ids, attention_mask (and token_type_ids), INT64, free dims."""
    constants = {item.name for item in model.graph.initializer}
    inputs = {item.name: item for item in model.graph.input if item.name not in constants}
    required = {graph.INPUT_IDS, graph.ATTENTION_MASK}
    if not required <= inputs.keys() <= required | {graph.TOKEN_TYPE_IDS}:
        raise ConfigError(
            f"the model's inputs are {', '.join(sorted(inputs)) or 'none'}; "
            "expected input_ids, attention_mask and at most token_type_ids"
        )
    for name, item in inputs.items():
        kind = item.type.tensor_type.elem_type
        if kind != TensorProto.INT64:
            raise ConfigError(f"input {name} is {TensorProto.DataType.Name(kind)}, expected INT64")
        shape = graph.dims(item)
        if len(shape) != 2 or any(isinstance(dim, int) for dim in shape):
            raise ConfigError(
                f"input {name} has shape {list(shape)}, expected two free dimensions: export with dynamic batch and sequence"
            )


def choose_output(model: onnx.ModelProto, task: Task) -> Shape:
    """Return which output serves the task; raises ConfigError when none does or several could.

    Ranks and sizes are what a run of two rows of three tokens gives, not what the file claims.
    """
    names = [item.name for item in model.graph.output]
    name = next((name for name in _PREFERRED[task] if name in names), names[0] if len(names) == 1 else None)
    if name is None:
        raise ConfigError(f"the model's outputs are {', '.join(names)}: which one? Name it {_PREFERRED[task][0]}")
    rows, tokens = 2, 3
    value = _first_run(model, name, rows, tokens)
    if value.dtype != np.float32:
        raise ConfigError(f"output {name} is {value.dtype}, expected FP32")
    fits = value.ndim == 2 or (value.ndim == 3 and task == "embed" and value.shape[1] == tokens)
    if not fits or value.shape[0] != rows:
        expected = "[batch, classes]" if task == "classify" else "[batch, sequence, hidden] or [batch, size]"
        raise ConfigError(
            f"output {name} has shape {list(value.shape)} for {rows} rows of {tokens} tokens, expected {expected}"
        )
    if task == "classify" and value.shape[1] < 2:
        raise ConfigError(f"output {name} has {value.shape[1]} class, expected two or more")
    return Shape(name, value.ndim, int(value.shape[-1]))


def _first_run(model: onnx.ModelProto, output: str, rows: int, tokens: int) -> np.ndarray:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    ones = np.ones((rows, tokens), np.int64)
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return np.asarray(session.run([output], {graph.INPUT_IDS: ones, graph.ATTENTION_MASK: ones})[0])
    except Exception as exc:  # noqa: BLE001 - ONNX Runtime's errors share no base class but Exception
        raise ConfigError(f"ONNX Runtime refuses the model: {_line(exc)}") from None


def probe(runner: Runner, encode: Encoder, texts: Sequence[str], max_tokens: int) -> float:
    """Run real texts, the tokenizer's highest id and the longest row; return the largest change by padding.

    Raises ConfigError when a run fails or gives NaN or Inf.
    """
    # No text of the probe may be longer than the model's limit.
    rows = [row[:max_tokens] for row in encode(texts)]
    longest = max(len(row) for row in rows)
    try:
        runner([np.resize(rows[-1], max_tokens)])
    except Exception as exc:  # noqa: BLE001 - ONNX Runtime's errors share no base class but Exception
        raise ConfigError(f"the model fails at {max_tokens} tokens, set --max-tokens: {_line(exc)}") from None
    try:
        together = runner(rows, max(longest, min(longest + 5, max_tokens)))
        alone = np.concatenate([runner([row]) for row in rows])
        runner([np.array([encode.highest_id], np.int64)])
    except Exception as exc:  # noqa: BLE001 - ONNX Runtime's errors share no base class but Exception
        raise ConfigError(f"the model fails on its tokenizer's ids: {_line(exc)}") from None
    if not (np.isfinite(alone).all() and np.isfinite(together).all()):
        raise ConfigError("the model answers NaN or Inf for plain text")
    return float(np.abs(alone - together).max())


def _line(exc: Exception) -> str:
    return " ".join(str(exc).split())[:240]
