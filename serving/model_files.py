"""What belongs to one version of a model: its spec, tokenizer and canary, from Triton's config and the model's folder."""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.errors import ConfigError
from serving.models import ModelSpec, parse_spec, version_file
from serving.postprocess import FloatArray
from serving.preprocess import IdArray, Tokenizer
from serving.tokenizer_files import Backend


@dataclass(frozen=True, slots=True)
class Canary:
    """One known row: input tensors of shape [1, tokens] and the output it must give within ``tolerance``."""

    inputs: Mapping[str, IdArray]
    values: FloatArray
    tolerance: float


@dataclass(frozen=True, slots=True)
class Model:
    """A model a caller may name."""

    spec: ModelSpec
    tokenizer: Tokenizer
    canary: Canary | None


def read_model(
    folder: Path, config: Mapping[str, object], version: str, loaded: MutableMapping[str, Backend] | None = None
) -> Model:
    """Read what belongs to a version, from the config Triton has loaded of it and the model's folder. Blocks.

    ``loaded``: tokenizers that were read already, by their hash; this one is taken out. Raises ConfigError, whatever is wrong with its files.
    """
    try:
        spec = parse_spec(config, version, _read_labels(folder, config, version))
        tokenizer = Tokenizer(version_file(folder, version, "tokenizer"), spec, loaded)
        return Model(spec, tokenizer, _read_canary(folder, version))
    except ConfigError:
        raise
    except Exception as exc:  # the tokenizer's libraries name no errors of their own
        raise ConfigError(f"model {folder.name}: its config or files cannot be read: {exc}") from exc


def _read_labels(folder: Path, config: Mapping[str, object], version: str) -> list[str]:
    outputs = config.get("output")
    first = outputs[0] if isinstance(outputs, list) and outputs else {}
    name = first.get("label_filename") if isinstance(first, dict) else None
    if not name:
        return []
    try:
        return version_file(folder, version, str(name)).read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as exc:
        raise ConfigError(f"model {folder.name}: label file {name} cannot be read") from exc


def _read_canary(folder: Path, version: str) -> Canary | None:
    file = version_file(folder, version, "canary.json")
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        inputs = {name: np.asarray([ids], dtype=np.int64) for name, ids in content["inputs"].items()}
        values = np.asarray(content["output"]["values"], dtype=np.float32)
        return Canary(inputs, values, float(content["output"]["tolerance"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"model {folder.name}: canary.json is not a canary row") from exc
