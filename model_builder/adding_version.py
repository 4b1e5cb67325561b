"""Add a further version to a user's model: the same checks as for a new model, and a folder nobody serves from yet."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from model_builder.adding import make, request_of
from model_builder.answers import BuiltModel
from model_builder.folder import Parts, staging
from model_builder.listing import MODEL_FILE, VERSION
from model_builder.versions import CANARY, first_config, note_in_record
from serving.errors import ConfigError
from serving.models import tokenizer_sha256
from serving.triton_client import parse_config


def add_version(
    repository: Path,
    name: str,
    onnx_file: Path,
    tokenizer: Path,
    task: str,
    labels: Sequence[str] | Path | None,
    version: str,
    progress: Callable[[str], None],
) -> BuiltModel:
    """Write ``<model>/<version>`` with what differs from the model's own tokenizer and labels; see ``adding.add``.

    The model's config says how texts are cut and what is put before them. Raises ConfigError also where the new file
    gives another output than the config describes, or the version is there already.
    """
    request = request_of(name, onnx_file, tokenizer, task, labels)
    config = parse_config(first_config(repository, name))
    folder = repository / name
    if not VERSION.fullmatch(version):
        raise ConfigError(f"version {version!r}: a version is a whole number from 1")
    if (folder / version).exists():
        raise ConfigError(f"{folder / version} is there already: a version never changes, take the next number")
    parameters = {key: value.get("string_value", "") for key, value in config["parameters"].items()}
    if parameters.get("task") != request.task:
        raise ConfigError(f"{name} is there to {parameters.get('task')}, not to {request.task}")
    request = replace(
        request, max_tokens=int(parameters["max_tokens"]), prompt_prefix=parameters.get("prompt_prefix", "")
    )
    with staging(repository) as work:
        made, parts = make(request, work, progress)
        output = config["output"][0]
        if [made.output, str(made.output_size)] != [output["name"], str(output["dims"][0])]:
            raise ConfigError(
                f"the model gives {made.output} [{made.output_size}], "
                f"{name} has {output['name']} {output['dims']}: add it under another name"
            )
        _write(work / version, folder, request.labels, parts)
        (work / version).rename(folder / version)
        note_in_record(folder, f"{version}/")
    progress(f"{name}: version {version} added; `twodoor models switch {name} {version}` serves it")
    return BuiltModel(name, folder, parts.precision, len(parts.onnx), changed=True)


def _write(target: Path, folder: Path, given_labels: Sequence[str], parts: Parts) -> None:
    target.mkdir()
    (target / MODEL_FILE).write_bytes(parts.onnx)
    (target / CANARY).write_text(json.dumps(parts.canary) + "\n")
    if tokenizer_sha256(parts.tokenizer) != tokenizer_sha256(folder / "tokenizer"):
        parts.tokenizer.rename(target / "tokenizer")
    labels = "".join(f"{label}\n" for label in given_labels)
    if labels and (folder / "labels.txt").read_text(encoding="utf-8") != labels:
        (target / "labels.txt").write_text(labels, encoding="utf-8")
