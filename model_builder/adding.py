"""Add a user's own ONNX model to a repository, or refuse it with one clear line."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from model_builder import canary, card, graph
from model_builder.answers import BuiltModel
from model_builder.config import ModelConfig, Task, default_cores, twin_name
from model_builder.folder import Parts, publish, staging, write
from model_builder.inspecting import PROBE_TEXTS, Shape, check_inputs, check_opset, choose_output, probe
from model_builder.run import Runner
from model_builder.tokens import Encoder, copy_folder, max_length
from serving.errors import ConfigError
from serving.models import tokenizer_sha256

DEFAULT_MAX_TOKENS = 512
# Below, no room is left between the special tokens; above, the warm-up alone would be hundreds of shapes.
LEAST_TOKENS, MOST_TOKENS = 8, 8192
# A protobuf message cannot be larger, and Triton's copy of the file has no external data beside it.
MAX_MODEL_BYTES = 2**31 - 2**20
# Over this the answer depends on the padding: most often dynamic quantization, or a mask the graph does not use.
INVARIANT = 1e-3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_TASKS: dict[str, Task] = {"classify": "classify", "embed": "embed"}


@dataclass(frozen=True)
class Request:
    """What a user gave: the model's name, its files, and how it is to be used."""

    name: str
    onnx_file: Path
    tokenizer: Path
    task: Task
    labels: tuple[str, ...]
    max_tokens: int
    prompt_prefix: str
    has_twin: bool = True


def add(
    repository: Path,
    name: str,
    onnx_file: Path,
    tokenizer: Path,
    task: str,
    labels: Sequence[str] | Path | None = None,
    max_tokens: int | None = None,
    prompt_prefix: str = "",
    progress: Callable[[str], None] = print,
    *,
    has_twin: bool = True,
) -> BuiltModel:
    """Make a model and its bulk twin, or one model that serves both lanes, out of an ONNX file and a folder with tokenizer.json.

    The file takes input_ids, attention_mask and perhaps token_type_ids (zeros from then on), INT64 [b, s], and gives
    FP32 logits [b, c] for ``classify``, or hidden states [b, s, h] or pooled vectors [b, h] for ``embed``. Raises
    ConfigError that says what is wrong with the name, files, inputs, outputs, opset, or labels.
    """
    _check_name(repository, name)
    request = request_of(name, onnx_file, tokenizer, task, labels, max_tokens, prompt_prefix)
    request = replace(request, has_twin=has_twin)
    with staging(repository) as work:
        _check_name(repository, name)
        config, parts = make(request, work, progress)
        for folder in write(work, config, parts):
            publish(work, repository, folder)
    path = repository / name
    progress(f"{name}: added, {len(parts.onnx) / 1e6:.1f} MB, output {config.output} [{config.output_size}]")
    return BuiltModel(name, path, parts.precision, len(parts.onnx), changed=True)


def request_of(
    name: str,
    onnx_file: Path,
    tokenizer: Path,
    task: str,
    labels: Sequence[str] | Path | None,
    max_tokens: int | None = None,
    prompt_prefix: str = "",
) -> Request:
    """Check what can be checked without the files; raises ConfigError."""
    if task not in _TASKS:
        raise ConfigError(f"task is {task!r}, expected classify or embed")
    if max_tokens is not None and not LEAST_TOKENS <= max_tokens <= MOST_TOKENS:
        raise ConfigError(f"max_tokens is {max_tokens}, expected {LEAST_TOKENS} to {MOST_TOKENS}")
    return Request(
        name=name,
        onnx_file=onnx_file,
        tokenizer=tokenizer,
        task=_TASKS[task],
        labels=_read_labels(labels, task),
        max_tokens=max_tokens or _own_limit(tokenizer),
        prompt_prefix=prompt_prefix,
    )


def _own_limit(tokenizer: Path) -> int:
    limit = max_length(tokenizer)
    return limit if limit is not None and LEAST_TOKENS <= limit <= MOST_TOKENS else DEFAULT_MAX_TOKENS


def _check_name(repository: Path, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"model name {name!r}: use letters, digits, _ and -, at most 64, a letter or digit first")
    if name.endswith("_bulk"):
        raise ConfigError(f"model name {name}: names that end in _bulk are kept for bulk twins")
    for taken in (name, twin_name(name)):
        if (repository / taken).exists():
            raise ConfigError(
                f"{repository} has a model {taken} already: choose another name, or remove its folder first"
            )


def _read_labels(labels: Sequence[str] | Path | None, task: str) -> tuple[str, ...]:
    if labels is None:
        return ()
    if task != "classify":
        raise ConfigError("labels are for classify only")
    if isinstance(labels, Path):
        try:
            labels = labels.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"{labels} cannot be read as UTF-8 text with one label a line") from None
    found = tuple(label.strip() for label in labels if label.strip())
    if any("\n" in label for label in found):
        raise ConfigError("a label holds a line break")
    if len(set(found)) != len(found):
        raise ConfigError("the labels are not all different")
    return found


def make(request: Request, work: Path, progress: Callable[[str], None]) -> tuple[ModelConfig, Parts]:
    """Make everything a model folder holds of what the user gave; ``work`` is an empty folder for it."""
    tokenizer = work / f"{request.name}.tokenizer"
    copy_folder(request.tokenizer, tokenizer, request.max_tokens)
    encode = Encoder(tokenizer, request.prompt_prefix)
    model = _two_inputs(_load(request.onnx_file))
    shape = _graft(model, request)
    content = graph.finish(model, f"{request.name}, added").SerializeToString(deterministic=True)
    cores = default_cores()
    runner = Runner(content, cores)
    change = probe(runner, encode, PROBE_TEXTS, request.max_tokens)
    if change > INVARIANT:
        progress(f"{request.name}: warning: answers change by up to {change:.2g} with padding and neighbours")
    labels = _fit_labels(request, shape.width)
    config = ModelConfig(
        name=request.name,
        task=request.task,
        output=graph.LOGITS if request.task == "classify" else graph.EMBEDDING,
        output_size=shape.width,
        max_tokens=request.max_tokens,
        prompt_prefix=request.prompt_prefix,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        labels=labels,
        cores=cores,
        has_twin=request.has_twin,
    )
    facts = _facts(request, shape, config, change)
    parts = Parts(
        title="added by the user",
        precision="as given",
        fingerprint="",
        onnx=content,
        tokenizer=tokenizer,
        canary=canary.make(runner, encode, config.output),
        card=card.added_card(request.name, facts),
    )
    return config, parts


def _load(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(path)
        if model.ByteSize() > MAX_MODEL_BYTES:
            raise ConfigError(f"{path} is larger than 2 GB, which one ONNX file cannot hold")
        check_opset(model)
        onnx.checker.check_model(model)
    except OSError:
        raise ConfigError(f"{path} cannot be read") from None
    except (DecodeError, onnx.checker.ValidationError) as exc:
        reason = (str(exc).splitlines() or ["unreadable"])[0]
        raise ConfigError(f"{path} is not a valid ONNX model: {reason[:200]}") from None
    check_inputs(model)
    return model


def _two_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        converted = graph.to_opset(model)
    except Exception as exc:  # noqa: BLE001 - onnx's converter raises bare errors of its C++ side
        raise ConfigError(
            f"the model does not convert to opset {graph.OPSET}: {str(exc).splitlines()[0][:200]}"
        ) from None
    graph.fix_inputs(converted)
    return converted


def _graft(model: onnx.ModelProto, request: Request) -> Shape:
    shape = choose_output(model, request.task)
    if shape.rank == 3:
        graph.graft_embedding(model, shape.output)
        graph.set_output(model.graph, graph.EMBEDDING, shape.width)  # the file may not know its width
    else:
        wanted = graph.LOGITS if request.task == "classify" else graph.EMBEDDING
        graph.set_output(model.graph, shape.output, shape.width)
        graph.rename_output(model.graph, shape.output, wanted)
    return shape


def _fit_labels(request: Request, width: int) -> tuple[str, ...]:
    if request.task != "classify":
        return ()
    labels = request.labels or tuple(f"label_{index}" for index in range(width))
    if len(labels) != width:
        raise ConfigError(f"{len(labels)} labels for a model with {width} classes")
    return labels


def _facts(request: Request, shape: Shape, config: ModelConfig, change: float) -> dict[str, str]:
    pooled = "mean-pooled and L2-normed in the graph" if shape.rank == 3 else "as the model gives it"
    facts = {
        "task": request.task,
        "inputs": "`input_ids`, `attention_mask` INT64 [-1]; token types, if the model knows any, are zeros",
        "output": f"`{config.output}` FP32 [{config.output_size}], {pooled}",
        "most tokens": str(request.max_tokens),
        "prefix put before each text": f"`{request.prompt_prefix}`" if request.prompt_prefix else "none",
        "bulk twin": f"`{config.bulk_model}`, the same file"
        if config.has_twin
        else "none: callers go first in one queue",
        "largest change with padding and neighbours, seen at adding": f"{change:.1e}",
    }
    if config.labels:
        facts["labels"] = ", ".join(config.labels)
    return facts
