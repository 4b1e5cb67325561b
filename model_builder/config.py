"""Render config.pbtxt. Only what NVIDIA's native ONNX Runtime backend accepts too is written."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Task = Literal["classify", "embed"]

MAX_CORES = 4
# With one instance and a queue policy Triton's batcher, once it found the instance busy, looks at its queue again only
# by a timer of half a second, and single calls wait for that. With two instances it does not come to this.
MIN_INSTANCES = 2
# Rows the interactive lane may join, and rows of one bulk micro-batch; both also bounded by padded tokens.
INTERACTIVE_ROWS, INTERACTIVE_QUEUE = 64, 512
BULK_ROWS, BULK_QUEUE = 32, 64
# Warm-up runs of many rows: at most this many padded tokens. On a CPU nothing is compiled for a shape: the first run of
# one takes a tenth longer than the next, and running all of them is nearly the whole time of a start. So there three run.
WARM_TOKENS = 2048
WARM_SHAPES_CPU = ((1, 16), (1, 64), (16, 64))
# Triton's own limit is never the one that counts: callers shorten it to their deadline.
QUEUE_TIMEOUT_US = 60_000_000
BULK_BATCH_MS = 25
# The folder of a further version may lie there before it is switched to: Triton must not take it for that alone.
FIRST_VERSION = "1"


@dataclass(frozen=True)
class ModelConfig:
    """What differs between models: ``output_size`` values per row, ``labels`` for classify only.

    ``for_gpu``: warm every shape its lanes send. ``has_twin``: bulk work has instances of its own; without, both lanes
    share these by priority.
    """

    name: str
    task: Task
    output: str
    output_size: int
    max_tokens: int
    prompt_prefix: str
    tokenizer_sha256: str
    labels: tuple[str, ...]
    cores: int
    for_gpu: bool = False
    has_twin: bool = True

    @property
    def bulk_model(self) -> str:
        """The name of the model that serves the bulk lane."""
        return twin_name(self.name) if self.has_twin else self.name


def default_cores() -> int:
    """Return how many threads or bulk instances a model gets: the cores of this machine, four at most."""
    return max(1, min(os.cpu_count() or 1, MAX_CORES))


def twin_name(name: str) -> str:
    """Return the name of a model's bulk twin."""
    return f"{name}_bulk"


def render(config: ModelConfig, *, bulk: bool) -> str:
    """Return the text of config.pbtxt for the model, or for its bulk twin."""
    name = twin_name(config.name) if bulk else config.name
    rows, queue = (BULK_ROWS, BULK_QUEUE) if bulk else (INTERACTIVE_ROWS, INTERACTIVE_QUEUE)
    instances = MIN_INSTANCES if config.for_gpu else max(MIN_INSTANCES, config.cores)
    label_file = '\n    label_filename: "labels.txt"' if config.labels else ""
    return f"""# Made by model_builder; a rebuild replaces it.
name: {quote(name)}
platform: "onnxruntime_onnx"
max_batch_size: {rows}
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }}
]
output [
  {{
    name: {quote(config.output)}
    data_type: TYPE_FP32
    dims: [ {config.output_size} ]{label_file}
  }}
]
instance_group [ {{ count: {instances} kind: KIND_AUTO }} ]
optimization {{ priority: {"PRIORITY_MIN" if bulk else "PRIORITY_MAX"} }}
version_policy {{ specific {{ versions: [ {FIRST_VERSION} ] }} }}
dynamic_batching {{
  default_queue_policy {{
{_policy("    ", queue)}
  }}{"" if config.has_twin else _levels()}
}}
{_parameters(config, bulk=bulk)}
{_warmup(config, rows)}"""


def _policy(indent: str, queue: int) -> str:
    lines = (
        "timeout_action: REJECT",
        f"default_timeout_microseconds: {QUEUE_TIMEOUT_US}",
        "allow_timeout_override: true",
        f"max_queue_size: {queue}",
    )
    return "\n".join(f"{indent}{line}" for line in lines)


def _levels() -> str:
    """Return two levels: callers, who send no priority, have the first, and bulk work waits in a short queue behind them."""
    policies = "".join(
        f"\n  priority_queue_policy {{\n    key: {level}\n    value {{\n{_policy('      ', queue)}\n    }}\n  }}"
        for level, queue in ((1, INTERACTIVE_QUEUE), (2, BULK_QUEUE))
    )
    return f"\n  priority_levels: 2\n  default_priority_level: 1{policies}"


def _parameters(config: ModelConfig, *, bulk: bool) -> str:
    values = {
        "task": config.task,
        "max_tokens": str(config.max_tokens),
        "prompt_prefix": config.prompt_prefix,
        "tokenizer_sha256": config.tokenizer_sha256,
        "intra_op_thread_count": "1",
    }
    if bulk:
        values["twin_of"] = config.name
    else:
        values["bulk_model"] = config.bulk_model
        values["bulk_batch_ms"] = str(BULK_BATCH_MS)
        values["serve_version"] = FIRST_VERSION
    return "\n".join(
        f"parameters {{ key: {quote(key)} value {{ string_value: {quote(value)} }} }}" for key, value in values.items()
    )


def warm_lengths(max_tokens: int) -> Sequence[int]:
    """Return the padded lengths a single text can have: multiples of 16 up to 128, of 64 above, up to the limit."""
    lengths = [*range(16, 129, 16), *range(192, max_tokens + 64, 64)]
    return sorted({min(length, max_tokens) for length in lengths})


def warm_shapes(config: ModelConfig, max_rows: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, length) of each warm-up run."""
    if not config.for_gpu:
        yield from sorted({(min(rows, max_rows), min(length, config.max_tokens)) for rows, length in WARM_SHAPES_CPU})
        return
    for length in warm_lengths(config.max_tokens):
        yield 1, length
        rows = min(max_rows, WARM_TOKENS // length)
        if rows > 1:
            yield rows, length


def _warmup(config: ModelConfig, max_rows: int) -> str:
    entry = (
        '  {{ name: "{rows}x{length}" batch_size: {rows}\n'
        '    inputs {{ key: "input_ids" value {{ data_type: TYPE_INT64 dims: [ {length} ] zero_data: true }} }}\n'
        '    inputs {{ key: "attention_mask" value {{ data_type: TYPE_INT64 dims: [ {length} ] zero_data: true }} }} }}'
    )
    entries = [entry.format(rows=rows, length=length) for rows, length in warm_shapes(config, max_rows)]
    return "model_warmup [\n" + ",\n".join(entries) + "\n]\n"


def quote(value: str) -> str:
    """Return a string literal of protobuf's text format; bytes beyond printable ASCII become octal escapes."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in (34, 92) else f"\\{byte:03o}" for byte in value.encode()
    )
    return f'"{plain}"'
