"""What a door knows of a model: its spec, read from the config Triton has loaded, and its folder's tokenizer hash."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from serving.errors import ConfigError

Task = Literal["classify", "embed", "raw"]
Lane = Literal["interactive", "bulk"]

TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
REQUIRED_INPUTS = frozenset({"input_ids", "attention_mask"})
SENTIMENT_LABELS = ("negative", "positive")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One loaded model version, as both doors see it.

    ``inputs`` are INT64 tensors of shape [rows, tokens]; ``output`` is an FP32 tensor of shape [rows, output_size].
    """

    name: str
    version: str
    task: Task
    max_tokens: int
    prompt_prefix: str
    tokenizer_sha256: str
    labels: tuple[str, ...]
    bulk_model: str
    bulk_batch_ms: float
    inputs: tuple[str, ...]
    output: str
    output_size: int
    max_batch_rows: int
    on_gpu: bool
    serve_version: str = ""
    """The version that new work goes to where it is ready, from parameter ``serve_version``; "" = the newest."""
    instances: int = 1
    """How many instances Triton runs of it, and so how many requests it works on at one time."""
    bulk_instances: int = 1
    """The same of the model that serves the bulk lane."""
    bulk_priority: int = 0
    """Triton's priority level of bulk requests where both lanes share the instances (callers have 1); 0 = they do not."""

    @property
    def is_sentiment(self) -> bool:
        """Whether answers also carry ``sentiment``, and ``score`` means the probability of positive."""
        return self.labels == SENTIMENT_LABELS

    def triton_name(self, lane: Lane) -> str:
        """Return the name of the Triton model that serves this lane."""
        return self.name if lane == "interactive" else self.bulk_model

    def priority(self, lane: Lane) -> int:
        """Return the priority a request of this lane carries; 0 = none, where each lane has instances of its own."""
        return self.bulk_priority if lane == "bulk" else min(1, self.bulk_priority)

    @property
    def lanes_are_equals(self) -> bool:
        """Whether nothing takes the processor away from a running micro-batch: on a GPU, and where lanes share instances."""
        return self.on_gpu or self.bulk_model == self.name


def bucket_length(tokens: int) -> int:
    """Return the padded length of a single row: multiples of 16 up to 128, of 64 above.

    Triton only batches requests of equal shape, so single rows must agree on few lengths.
    """
    step = 16 if tokens <= 128 else 64
    return max(step, math.ceil(tokens / step) * step)


def padded_length(spec: ModelSpec, lengths: Sequence[int]) -> int:
    """Return the common length of one request's rows; many rows on a CPU are padded to their own longest."""
    longest = max(lengths)
    if len(lengths) > 1 and not spec.on_gpu:
        return longest
    return min(bucket_length(longest), max(spec.max_tokens, longest))


def tokenizer_sha256(folder: Path) -> str:
    """Return the SHA-256 over the sorted relative names and contents of a tokenizer folder's files."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = file.read_bytes()
        name = file.relative_to(folder).as_posix().encode()
        digest.update(len(name).to_bytes(8, "big") + name + len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def version_file(folder: Path, version: str, name: str) -> Path:
    """Return a file or folder of a model version: the version's own where it has one, else the model's."""
    own = folder / version / name
    return own if own.exists() else folder / name


def twin_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of the model this one is the bulk twin of, or None."""
    return _parameters(config).get("twin_of")


def parse_spec(config: Mapping[str, Any], version: str, labels: Sequence[str]) -> ModelSpec:
    """Read a spec from a loaded config (Triton's ModelConfig as a mapping with proto field names).

    Raises ConfigError where the config breaks what the doors rely on: queue bound, a timeout that may be
    overridden (Triton otherwise ignores a request's timeout without a word), input names and types, lanes.
    """
    name = str(config["name"])
    parameters = _parameters(config)
    task = parameters.get("task", "raw")
    if task not in ("classify", "embed", "raw"):
        raise ConfigError(f"model {name}: parameter task is {task!r}, expected classify, embed or raw")
    check_queue(config)
    inputs = _check_inputs(name, config)
    output, size = _check_output(name, config)
    if task == "classify" and len(labels) != size:
        raise ConfigError(f"model {name}: {len(labels)} labels for an output of {size}")
    bulk_model = parameters.get("bulk_model", name)
    bulk_priority = _bulk_priority(config) if bulk_model == name else 0
    return ModelSpec(
        name=name,
        version=version,
        task=cast("Task", task),
        max_tokens=_int_parameter(name, parameters, "max_tokens"),
        prompt_prefix=parameters.get("prompt_prefix", ""),
        # A version that brings a tokenizer of its own has a hash of its own.
        tokenizer_sha256=parameters.get(f"tokenizer_sha256_{version}", parameters.get("tokenizer_sha256", "")),
        labels=tuple(labels) if task == "classify" else (),
        bulk_model=bulk_model,
        bulk_batch_ms=_bulk_batch_ms(name, parameters),
        inputs=inputs,
        output=output,
        output_size=size,
        max_batch_rows=max(1, int(config.get("max_batch_size", 0))),
        on_gpu=any(str(group.get("kind")) in ("KIND_GPU", "1") for group in config.get("instance_group", ())),
        serve_version=parameters.get("serve_version", ""),
        instances=instances_of(config),
        bulk_instances=instances_of(config),
        bulk_priority=bulk_priority,
    )


def instances_of(config: Mapping[str, Any]) -> int:
    """Return how many instances a loaded config has in all."""
    return sum(max(1, int(group.get("count", 1))) for group in config.get("instance_group", ())) or 1


def check_queue(config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the model's queue has a bound, at each level, and lets a request shorten its timeout."""
    batching = config.get("dynamic_batching", {})
    policies = {"default_queue_policy": batching.get("default_queue_policy", {})}
    for level, policy in batching.get("priority_queue_policy", {}).items():
        policies[f"priority_queue_policy of level {level}"] = policy
    for place, policy in policies.items():
        _check_policy(config["name"], place, policy)


def _check_policy(name: str, place: str, policy: Mapping[str, Any]) -> None:
    if int(policy.get("max_queue_size", 0)) < 1:
        raise ConfigError(f"model {name}: dynamic_batching.{place}.max_queue_size must be set: the queue has no bound")
    if not policy.get("allow_timeout_override") or int(policy.get("default_timeout_microseconds", 0)) < 1:
        raise ConfigError(
            f"model {name}: {place} needs allow_timeout_override and default_timeout_microseconds, "
            "or Triton ignores a request's timeout"
        )


def _bulk_priority(config: Mapping[str, Any]) -> int:
    """Return the level of bulk requests in a model that serves both lanes, its lowest; 0 where it has no levels.

    Raises ConfigError where a request without a priority would not be a caller's: Triton then takes the default level,
    and for a level that it does not have it does so without a word.
    """
    batching = config.get("dynamic_batching", {})
    levels, default = int(batching.get("priority_levels", 0)), int(batching.get("default_priority_level", 0))
    if levels == 0:
        return 0
    if levels < 2 or default != 1:
        raise ConfigError(
            f"model {config['name']} serves both lanes with priority_levels {levels} and default_priority_level {default}: "
            "it needs two levels or more, and level 1, that of callers, as the default"
        )
    return levels


def check_twin(spec: ModelSpec, twin: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the twin takes and gives what its first model does, at the lowest priority."""
    check_queue(twin)
    name = twin["name"]
    if _check_inputs(name, twin) != spec.inputs or _check_output(name, twin) != (spec.output, spec.output_size):
        raise ConfigError(f"model {name}: inputs or outputs differ from those of {spec.name}")
    if str(twin.get("optimization", {}).get("priority", "")) not in ("PRIORITY_MIN", "2"):
        raise ConfigError(f"model {name}: optimization.priority must be PRIORITY_MIN, or bulk work is not kept behind")


def _parameters(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()}


def _int_parameter(model: str, parameters: Mapping[str, str], name: str) -> int:
    try:
        value = int(parameters.get(name, ""))
    except ValueError:
        raise ConfigError(f"model {model}: parameter {name} must be a whole number") from None
    if value < 1:
        raise ConfigError(f"model {model}: parameter {name} must be at least 1")
    return value


def _bulk_batch_ms(model: str, parameters: Mapping[str, str]) -> float:
    try:
        value = float(parameters.get("bulk_batch_ms", "25"))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"model {model}: parameter bulk_batch_ms must be a number of milliseconds, 0 = no bound")
    return value


def _check_inputs(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    inputs = {str(item["name"]): item for item in config.get("input", ())}
    if not REQUIRED_INPUTS <= inputs.keys() <= set(TOKEN_INPUTS):
        raise ConfigError(f"model {name}: inputs are {sorted(inputs)}, expected input_ids and attention_mask")
    for key, item in inputs.items():
        if str(item.get("data_type")) not in ("TYPE_INT64", "9") or [int(d) for d in item.get("dims", ())] != [-1]:
            raise ConfigError(f"model {name}: input {key} must be TYPE_INT64 with dims [-1]")
    return tuple(key for key in TOKEN_INPUTS if key in inputs)


def _check_output(name: str, config: Mapping[str, Any]) -> tuple[str, int]:
    outputs = list(config.get("output", ()))
    if len(outputs) != 1:
        raise ConfigError(f"model {name}: {len(outputs)} outputs, expected one")
    dims = [int(d) for d in outputs[0].get("dims", ())]
    if str(outputs[0].get("data_type")) not in ("TYPE_FP32", "11") or len(dims) != 1 or dims[0] < 1:
        raise ConfigError(f"model {name}: output {outputs[0]['name']} must be TYPE_FP32 with one fixed dimension")
    return str(outputs[0]["name"]), dims[0]
