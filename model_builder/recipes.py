"""The default models: which fetched file becomes which model, and the graph of each at each precision."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from model_builder import check, graph, quantize, tables
from model_builder.config import Task
from model_builder.sources import E5_SMALL, MINILM_L6, Source
from model_builder.tokens import Encoder

Precision = Literal["int8", "fp16", "fp32"]
PRECISIONS: dict[str, Precision] = {"int8": "int8", "fp16": "fp16", "fp32": "fp32"}
HIDDEN = "last_hidden_state"
# Of different lengths, so that padding takes part in the comparison.
_TEXTS = ("fine", "not as bad as people say", "a long walk by the sea , told twice and never quite finished")


@dataclass(frozen=True)
class Recipe:
    """One default model. ``max_tokens`` is the limit the model was trained with or its authors state."""

    name: str
    title: str
    source: Source
    task: Task
    max_tokens: int
    prompt_prefix: str
    labels: tuple[str, ...]
    has_int8: bool

    @property
    def output(self) -> str:
        """The name of the only output."""
        return graph.LOGITS if self.task == "classify" else graph.EMBEDDING

    def effective(self, precision: Precision) -> Precision:
        """Return the precision this model is built in: one without an INT8 variant stays FP32 then."""
        return "fp32" if precision == "int8" and not self.has_int8 else precision


SENTIMENT = Recipe(
    name="sentiment_model", title="e5-small-v2 with a logistic head trained on SST-2", source=E5_SMALL,
    task="classify", max_tokens=512, prompt_prefix="query: ", labels=("negative", "positive"), has_int8=True,
)  # fmt: skip
EMBEDDING = Recipe(
    name="embedding_model", title="all-MiniLM-L6-v2, mean-pooled and L2-normed", source=MINILM_L6,
    task="embed", max_tokens=256, prompt_prefix="", labels=(), has_int8=False,
)  # fmt: skip
RECIPES = (SENTIMENT, EMBEDDING)


def hidden_graph(onnx_file: Path) -> tuple[onnx.ModelProto, dict[str, graph.QuantizedWeight]]:
    """Return the FP32 graph from two inputs to the hidden states [b, s, h], and the INT8 weights its file held."""
    model = onnx.load(onnx_file)
    weights = graph.dequantize(model)
    model = graph.to_opset(model)
    graph.fix_inputs(model)
    return model, weights


def embedding_graph(onnx_file: Path) -> onnx.ModelProto:
    """Return the FP32 graph up to the L2-normed embedding [b, h]."""
    model, _ = hidden_graph(onnx_file)
    graph.graft_embedding(model, HIDDEN)
    return model


def build_graph(
    recipe: Recipe, onnx_file: Path, precision: Precision, encode: Encoder, threads: int
) -> onnx.ModelProto:
    """Return the checked graph of a default model; its FP32 form was compared with plain NumPy pooling first."""
    model, weights = hidden_graph(onnx_file)
    hidden = onnx.ModelProto()
    hidden.CopyFrom(model)
    graph.graft_embedding(model, HIDDEN)
    head = tables.load_head() if recipe.task == "classify" else None
    if head is not None:
        graph.graft_head(model, head)
    check.compare(hidden, model, encode(_TEXTS), head, threads)
    effective = recipe.effective(precision)
    if effective == "int8":
        quantize.static_int8(model, weights, tables.load_ranges())
    elif effective == "fp16":
        model = quantize.half(model)
    return graph.finish(model, f"{recipe.title} ({effective})")
