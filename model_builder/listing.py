"""List the models of a repository from their folders, without Triton and without onnx."""

import re
from pathlib import Path

from model_builder.answers import ModelInfo
from model_builder.folder import config_text, read_record

_PARAMETER = re.compile(r'key:\s*"([^"]*)"\s*,?\s*value:?\s*{\s*string_value:\s*"([^"]*)"')


def list_models(repository: Path) -> list[ModelInfo]:
    """Return the repository's models by name; bulk twins are part of their first model and not listed."""
    folders = sorted(path for path in repository.glob("*") if (path / "config.pbtxt").is_file())
    return [info for path in folders if (info := _info(path)) is not None]


def _info(path: Path) -> ModelInfo | None:
    parameters = dict(_PARAMETER.findall(config_text(path)))
    if "twin_of" in parameters:
        return None
    record = read_record(path)
    model = path / "1" / "model.onnx"
    labels = path / "labels.txt"
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
    )
