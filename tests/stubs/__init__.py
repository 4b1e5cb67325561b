"""Model repositories for tests: the built models as hard links, and stub models whose faults are chosen by words.

``stub_faulty`` (and its twin ``stub_faulty_bulk``) has sentiment_model's tokenizer, the labels negative and positive,
and logits that depend on the row's own token ids alone, so a test can tell whether a neighbour's answer is right.
"""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from serving.models import tokenizer_sha256

BUILT = Path(__file__).resolve().parents[2] / "model_repository"
STUB = "stub_faulty"
LABELS = ("negative", "positive")
PREFIX = "query: "

# Each is one token of the tokenizer's vocabulary.
NAN = "obsidian"
INF = "cobalt"
FAIL = "vortex"
DIE = "glacier"
SLEEP = "lantern"
SLEEP_S = 2.0
WORDS = {"NAN": NAN, "INF": INF, "FAIL": FAIL, "DIE": DIE, "SLEEP": SLEEP}

_TEMPLATE = Path(__file__).parent / "faulty_model.py"


def write_repository(
    target: Path,
    models: Iterable[str] = ("sentiment_model", "embedding_model"),
    stubs: Iterable[str] = (STUB,),
    *,
    warmup: bool = False,
    source: Path = BUILT,
) -> Path:
    """Write a repository of built models with their twins, and of stubs with theirs; returns ``target``.

    Without ``warmup`` the built models start in a fraction of the time.
    """
    for name in models:
        for folder in (source / name, source / f"{name}_bulk"):
            if not folder.is_dir():
                raise FileNotFoundError(f"{folder} is not built: run `make setup`")
            _link(folder, target / folder.name)
            if not warmup:
                _drop_warmup(target / folder.name / "config.pbtxt")
    for name in stubs:
        write_stub(target, name, source / "sentiment_model" / "tokenizer")
    return target


def write_stub(target: Path, name: str, tokenizer: Path, *, bulk: bool = True, changes: Sequence[str] = ()) -> None:
    """Write one stub model and its twin, or without ``bulk`` one that serves both lanes by priority.

    ``changes`` are lines added to the first model's config.
    """
    folder = target / name
    shutil.copytree(tokenizer, folder / "tokenizer")
    vocabulary = FastTokenizer.from_file(str(tokenizer / "tokenizer.json"))
    code = _TEMPLATE.read_text().replace("WORD_IDS = {}", f"WORD_IDS = {word_ids(vocabulary)!r}")
    canary = _canary(vocabulary, "a canary of the stub")
    sha = tokenizer_sha256(folder / "tokenizer")
    pair = [(name, {"bulk_model": f"{name}_bulk" if bulk else name})]
    if bulk:
        pair.append((f"{name}_bulk", {"twin_of": name}))
    for model, parameters in pair:
        twin = "twin_of" in parameters
        priority = "PRIORITY_MIN" if twin else "PRIORITY_MAX"
        config = _config(model, {**parameters, "tokenizer_sha256": sha}, priority, levels=not bulk)
        (target / model / "1").mkdir(parents=True)
        (target / model / "1" / "model.py").write_text(code)
        (target / model / "labels.txt").write_text("\n".join(LABELS) + "\n")
        (target / model / "canary.json").write_text(json.dumps(canary))
        (target / model / "config.pbtxt").write_text("\n".join([config, *(() if twin else changes)]))


def word_ids(vocabulary: FastTokenizer) -> dict[str, int]:
    """Return fault → token id of its word."""
    ids = {fault: vocabulary.encode(word, add_special_tokens=False).ids for fault, word in WORDS.items()}
    if any(len(found) != 1 for found in ids.values()):
        raise ValueError(f"each of {sorted(WORDS.values())} must be one token, they are {ids}")
    return {fault: found[0] for fault, found in ids.items()}


def stub_logits(ids: Sequence[int]) -> list[float]:
    """Return the stub's logits of one row, from its ids without padding."""
    value = (sum(index * one for index, one in enumerate(ids, start=1)) % 4001 - 2000) / 1000
    return [-value, value]


def stub_score(text: str, repository: Path = BUILT) -> float:
    """Return the probability of positive that the stub gives a text, by way of a tokenizer of our own."""
    logits = np.asarray(stub_logits(_ids(_vocabulary(repository), text)))
    return float(np.exp(logits[1]) / np.exp(logits).sum())


@cache
def _vocabulary(repository: Path) -> FastTokenizer:
    return FastTokenizer.from_file(str(repository / "sentiment_model" / "tokenizer" / "tokenizer.json"))


def _ids(vocabulary: FastTokenizer, text: str) -> list[int]:
    vocabulary.no_padding()
    vocabulary.no_truncation()
    return list(vocabulary.encode(PREFIX + text).ids)


def _canary(vocabulary: FastTokenizer, text: str) -> dict[str, Any]:
    ids = _ids(vocabulary, text)
    return {
        "inputs": {"input_ids": ids, "attention_mask": [1] * len(ids)},
        "output": {"name": "logits", "values": stub_logits(ids), "tolerance": 0.05},
    }


def _config(name: str, parameters: dict[str, str], priority: str, *, levels: bool) -> str:
    policy = """{
    timeout_action: REJECT
    default_timeout_microseconds: 60000000
    allow_timeout_override: true
    max_queue_size: 64
  }"""
    both = "".join(f"\n  priority_queue_policy {{ key: {level} value {policy} }}" for level in (1, 2))
    both = f"\n  priority_levels: 2\n  default_priority_level: 1{both}" if levels else ""
    everything = {"task": "classify", "max_tokens": "512", "prompt_prefix": PREFIX, **parameters}
    lines = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in everything.items()
    )
    return f"""
name: "{name}"
backend: "python"
max_batch_size: 32
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }}
]
output [ {{ name: "logits" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }} ]
instance_group [ {{ count: {2 if levels else 1} kind: KIND_CPU }} ]
optimization {{ priority: {priority} }}
dynamic_batching {{
  default_queue_policy {policy}{both}
}}
{lines}
"""


def _link(source: Path, target: Path) -> None:
    for file in (path for path in source.rglob("*") if path.is_file()):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".onnx":
            shutil.copy(file, copy)
            continue
        try:
            os.link(file, copy)
        except OSError:  # another file system
            shutil.copy(file, copy)


def _drop_warmup(config: Path) -> None:
    text = config.read_text()
    config.write_text(text[: text.index("model_warmup")] if "model_warmup" in text else text)
