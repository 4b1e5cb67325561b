"""List the models of a repository from their folders, without Triton and without onnx."""

import re
from pathlib import Path

from model_builder.answers import ModelInfo
from model_builder.folder import config_text, read_record
from serving.models import version_file

MODEL_FILE = "model.onnx"
VERSION = re.compile(r"[1-9][0-9]{0,8}")
_PARAMETER = re.compile(r'key:\s*"([^"]*)"\s*,?\s*value:?\s*{\s*string_value:\s*"([^"]*)"')


def list_models(repository: Path) -> list[ModelInfo]:
    """Return the repository's models by name; bulk twins are part of their first model and not listed."""
    folders = sorted(path for path in repository.glob("*") if (path / "config.pbtxt").is_file())
    return [info for path in folders if (info := _info(path)) is not None]


def versions_of(folder: Path) -> tuple[str, ...]:
    """Return the versions of a model that have a file, newest first; which of them serve is for its config to say."""
    found = (path.parent.name for path in folder.glob(f"*/{MODEL_FILE}"))
    return tuple(sorted((name for name in found if VERSION.fullmatch(name)), key=int, reverse=True))


def served_version(folder: Path) -> str:
    """Return the version that serves new work when the model is loaded: what its config names, else the newest."""
    named = dict(_PARAMETER.findall(config_text(folder))).get("serve_version", "")
    there = versions_of(folder)
    return named if named in there else (there[0] if there else "")


def _info(path: Path) -> ModelInfo | None:
    parameters = dict(_PARAMETER.findall(config_text(path)))
    if "twin_of" in parameters:
        return None
    record = read_record(path)
    version = served_version(path)
    model = path / version / MODEL_FILE
    labels = version_file(path, version, "labels.txt")
    limit = parameters.get("max_tokens", "")
    return ModelInfo(
        name=path.name,
        task=parameters.get("task", "raw"),
        precision=record.precision if record else "",
        max_tokens=int(limit) if limit.isdigit() else 0,
        labels=tuple(labels.read_text(encoding="utf-8").splitlines()) if labels.is_file() else (),
        bulk_model=parameters.get("bulk_model", path.name),
        size_bytes=model.stat().st_size if model.is_file() else 0,
        made_here=record is not None,
        version=version,
    )
