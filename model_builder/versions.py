"""One version of a model: is it one that the model's config describes, and what a version needs beside its file."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from model_builder import canary
from model_builder.config import default_cores
from model_builder.folder import RECORD, config_text, files_of, read_record
from model_builder.inspecting import PROBE_TEXTS, probe
from model_builder.listing import MODEL_FILE, VERSION, versions_of
from model_builder.run import Runner
from model_builder.sources import sha256_file
from model_builder.tokens import Encoder
from serving.errors import ConfigError
from serving.models import ModelSpec, parse_spec, tokenizer_sha256, version_file
from serving.triton_client import parse_config

CANARY = "canary.json"


@dataclass(frozen=True)
class Version:
    """A version that was looked at: ``parameters`` is what its config has to say of it beyond what it says now."""

    spec: ModelSpec
    parameters: Mapping[str, str]


def examine(repository: Path, name: str, version: str) -> Version:
    """Look at a version, and give it a canary row and its twin the same file where they are missing.

    Raises ConfigError that says what is wrong with the version's file, inputs, outputs, tokenizer, labels or canary.
    """
    folder = repository / name
    text = first_config(repository, name)
    if not VERSION.fullmatch(version):
        raise ConfigError(f"version {version!r}: a version is a whole number from 1, the name of its folder")
    file = folder / version / MODEL_FILE
    if not file.is_file() or not file.stat().st_size:
        there = ", ".join(versions_of(folder)) or "none"
        raise ConfigError(f"{file} does not exist (versions that do: {there})")
    config = parse_config(text)
    parameters = _tokenizer_parameter(folder, version, config)
    spec = parse_spec(_with_parameters(config, parameters), version, _labels(folder, version, config))
    _check_tokenizer(folder, spec)
    _check_model(folder, spec)
    if spec.bulk_model != name:
        _give_twin(folder, repository / spec.bulk_model, version)
    return Version(spec, parameters)


def first_config(repository: Path, name: str) -> str:
    """Return the text of a first model's config; raises ConfigError where there is no such model."""
    text = config_text(repository / name) if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) else ""
    if not text:
        raise ConfigError(f"no model {name} in {repository}")
    if "twin_of" in parse_config(text).get("parameters", {}):
        raise ConfigError(f"{name} is a bulk twin: switch its first model")
    return text


def note_in_record(folder: Path, *names: str) -> None:
    """Let a folder's build.json know files (``2/`` = all of version 2) as they are now: they are part of it."""
    record = read_record(folder)
    if record is None:
        return
    found = [file for file in files_of(folder) if file.startswith(names)]
    files = dict(record.files) | {file: sha256_file(folder / file) for file in found}
    text = json.dumps(asdict(replace(record, files=dict(sorted(files.items())))), indent=1, ensure_ascii=False)
    write_atomically(folder / RECORD, f"{text}\n")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by its new content, whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)


def _tokenizer_parameter(folder: Path, version: str, config: Mapping[str, Any]) -> dict[str, str]:
    """A version with a tokenizer of its own needs a hash of its own in the config; one that is there is kept."""
    key = f"tokenizer_sha256_{version}"
    own = folder / version / "tokenizer"
    if not own.is_dir() or key in config.get("parameters", {}):
        return {}
    return {key: tokenizer_sha256(own)}


def _with_parameters(config: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
    added = {key: {"string_value": value} for key, value in parameters.items()}
    return {**config, "parameters": {**config.get("parameters", {}), **added}}


def _labels(folder: Path, version: str, config: Mapping[str, Any]) -> list[str]:
    outputs = config.get("output") or [{}]
    name = outputs[0].get("label_filename")
    if not name:
        return []
    try:
        return version_file(folder, version, name).read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{version_file(folder, version, name)} cannot be read as UTF-8 text") from None


def _check_tokenizer(folder: Path, spec: ModelSpec) -> None:
    path = version_file(folder, spec.version, "tokenizer")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"{path} has no tokenizer.json")
    if tokenizer_sha256(path) != spec.tokenizer_sha256:
        raise ConfigError(f"the files in {path} are not those that config.pbtxt names (tokenizer_sha256)")


def _check_model(folder: Path, spec: ModelSpec) -> None:
    """Run the file: inputs, output, the tokenizer's ids, and the canary row, which is made where none fits."""
    file = folder / spec.version / MODEL_FILE
    try:
        runner = Runner(file, default_cores())
    except Exception as exc:  # noqa: BLE001 - ONNX Runtime's errors share no base class but Exception
        raise ConfigError(f"{file}: ONNX Runtime refuses it: {' '.join(str(exc).split())[:240]}") from None
    if set(runner.inputs) != set(spec.inputs):
        raise ConfigError(f"{file}: its inputs are {sorted(runner.inputs)}, the config has {sorted(spec.inputs)}")
    if runner.outputs != [spec.output]:
        raise ConfigError(f"{file}: its outputs are {runner.outputs}, the config has {spec.output}")
    encode = Encoder(version_file(folder, spec.version, "tokenizer"), spec.prompt_prefix)
    probe(runner, encode, PROBE_TEXTS, spec.max_tokens)
    values = runner([row[: spec.max_tokens] for row in encode(PROBE_TEXTS)])
    if values.dtype != np.float32 or values.shape != (len(PROBE_TEXTS), spec.output_size):
        raise ConfigError(
            f"{file}: {spec.output} is {values.dtype} {list(values.shape[1:])}, the config has FP32 [{spec.output_size}]"
        )
    _check_canary(folder, spec, runner, encode)


def _check_canary(folder: Path, spec: ModelSpec, runner: Runner, encode: Encoder) -> None:
    path = version_file(folder, spec.version, CANARY)
    own = folder / spec.version / CANARY
    try:
        fits = path.is_file() and canary.deviation(runner, json.loads(path.read_bytes())) <= canary.TOLERANCE
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits and path == own and path.is_file():
        raise ConfigError(f"{own} is not what this version answers: remove it to have it made anew")
    if not fits:
        write_atomically(own, json.dumps(canary.make(runner, encode, spec.output)) + "\n")


def _give_twin(folder: Path, twin: Path, version: str) -> None:
    if not config_text(twin):
        raise ConfigError(f"the bulk twin {twin.name} is missing")
    for name in (MODEL_FILE, CANARY):
        source, target = folder / version / name, twin / version / name
        if not source.is_file():
            continue
        if target.is_file() and (target.samefile(source) or sha256_file(target) == sha256_file(source)):
            continue
        target.parent.mkdir(exist_ok=True)
        temporary = target.with_name(f".{name}.new")
        temporary.unlink(missing_ok=True)
        try:
            temporary.hardlink_to(source)
        except OSError:  # another file system
            shutil.copyfile(source, temporary)
        temporary.replace(target)
