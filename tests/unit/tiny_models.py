"""A BERT-like model and tokenizer of a few kilobytes, for tests of the builder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN = 64
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "fine", "not", "good", "bad", "as", "a", "long", "walk", "film",
         "people", "say", "by", "the", "sea", "told", "twice", "and", "never", "quite", "finished", "##s", ",")  # fmt: skip
VOCABULARY = len(WORDS)


def hidden_model(*, token_types: bool = False, opset: int = 17, seed: int = 0, positions: int = 0) -> onnx.ModelProto:
    """Embedding lookup, one MatMul, Tanh: last_hidden_state FP32 [b, s, 64]. With ``positions`` it takes no more tokens."""
    random = np.random.default_rng(seed)
    arrays = {
        "words": random.normal(size=(VOCABULARY, HIDDEN)),
        "types": random.normal(size=(2, HIDDEN)),
        "weight": random.normal(size=(HIDDEN, HIDDEN)) / 8,
        "places": random.normal(size=(max(positions, 1), HIDDEN)),
    }
    nodes = [helper.make_node("Gather", ["words", "input_ids"], ["looked_up"])]
    last = "looked_up"
    if token_types:
        nodes += [
            helper.make_node("Gather", ["types", "token_type_ids"], ["typed"]),
            helper.make_node("Add", [last, "typed"], ["typed_sum"]),
        ]
        last = "typed_sum"
    if positions:
        # A row longer than the table cannot be added to it: the same failure a real position table gives.
        nodes += [
            helper.make_node("Shape", ["input_ids"], ["shape"]),
            helper.make_node("Gather", ["shape", "one"], ["length"]),
            helper.make_node("Range", ["zero", "length", "one"], ["places_used"]),
            helper.make_node("Gather", ["places", "places_used"], ["placed"]),
            helper.make_node("Add", [last, "placed"], ["placed_sum"]),
        ]
        last = "placed_sum"
    nodes += [
        helper.make_node("MatMul", [last, "weight"], ["product"]),
        helper.make_node("Tanh", ["product"], ["last_hidden_state"]),
    ]
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if token_types else [])
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "s"]) for name in names],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["b", "s", HIDDEN])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in arrays.items()]
        + [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (("zero", 0), ("one", 1))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    return model


def classifier_model(classes: int = 3, *, opset: int = 17, output: str = "logits", **options: Any) -> onnx.ModelProto:
    """The hidden model with masked mean pooling and a Gemm: logits FP32 [b, classes]."""
    model = hidden_model(opset=opset, **options)
    random = np.random.default_rng(5)
    graph = model.graph
    for name, value in (("head", random.normal(size=(HIDDEN, classes))), ("bias", random.normal(size=classes))):
        graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    graph.node.extend(
        [
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("Einsum", ["mask", "last_hidden_state"], ["sum"], equation="bs,bsh->bh"),
            helper.make_node("Einsum", ["mask"], ["count"], equation="bs->b"),
            helper.make_node("Reshape", ["count", "column"], ["count_column"]),
            helper.make_node("Div", ["sum", "count_column"], ["mean"]),
            helper.make_node("Gemm", ["mean", "head", "bias"], [output]),
        ]
    )
    graph.initializer.append(numpy_helper.from_array(np.array([-1, 1], np.int64), "column"))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, ["b", classes]))
    return model


def write_tokenizer(folder: Path, *, max_length: int | None = 40, extra_words: int = 0) -> Path:
    """Write a WordPiece tokenizer whose file carries a padding and truncation of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*WORDS, *(f"extra{number}" for number in range(extra_words))]
    special = [
        {"id": index, "content": WORDS[index], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for index in range(5)
    ]  # fmt: skip
    definition = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "[PAD]"},
        "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]}
                               for index, name in ((2, "[CLS]"), (3, "[SEP]"))},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {word: index for index, word in enumerate(words)}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    settings: dict[str, Any] = {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    if max_length is not None:
        settings["model_max_length"] = max_length
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
