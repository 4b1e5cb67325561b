"""Model folders: written beside the repository, then moved into it whole, so that Triton never sees half a model."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model_builder.config import ModelConfig, render
from model_builder.sources import sha256_file
from serving.errors import ConfigError
from serving.models import tokenizer_sha256

RECORD = "build.json"


@dataclass(frozen=True)
class Record:
    """What a folder's build.json says: where it came from, and each file's SHA-256."""

    name: str
    title: str
    task: str
    precision: str
    max_tokens: int
    prompt_prefix: str
    labels: tuple[str, ...]
    bulk_model: str
    fingerprint: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Parts:
    """Everything one model folder is made of. ``tokenizer`` is a folder that is moved, not copied."""

    title: str
    precision: str
    fingerprint: str
    onnx: bytes
    tokenizer: Path
    canary: Mapping[str, Any]
    card: str


@contextmanager
def staging(repository: Path) -> Iterator[Path]:
    """Lock the repository against other builders and give an empty folder beside it, removed at the end.

    Raises ConfigError when another builder holds the lock or the folder cannot be written.
    """
    try:
        repository.mkdir(parents=True, exist_ok=True)
        lock = os.open(repository, os.O_RDONLY)
    except OSError as exc:
        raise ConfigError(f"the model repository {repository} cannot be used: {exc.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another build is at work in {repository}: wait for it to end") from None
        work = _staging_folder(repository.resolve())
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir()
        except OSError as exc:
            raise ConfigError(f"{work} cannot be made: {exc.strerror}") from None
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)


def _staging_folder(repository: Path) -> Path:
    """Beside the repository, since Triton lists every folder inside as a model; inside only where a rename from beside
    is impossible (a mounted volume), hidden and without a config.pbtxt of its own."""
    parent = repository.parent
    if parent.stat().st_dev == repository.stat().st_dev and os.access(parent, os.W_OK):
        return parent / f".{repository.name}.building"
    return repository / ".building"


def write(work: Path, config: ModelConfig, parts: Parts) -> tuple[Path, ...]:
    """Write the model's folder and its twin's, if it has one, under ``work``; returns them, the twin first.

    The twin's model.onnx is a hard link.
    """
    first, twins = work / config.name, [work / config.bulk_model] if config.has_twin else []
    for path in (*twins, first):
        (path / "1").mkdir(parents=True)
        (path / "canary.json").write_text(json.dumps(parts.canary) + "\n")
        if config.labels:
            (path / "labels.txt").write_text("".join(f"{label}\n" for label in config.labels), encoding="utf-8")
    parts.tokenizer.rename(first / "tokenizer")
    (first / "1" / "model.onnx").write_bytes(parts.onnx)
    (first / "MODEL_CARD.md").write_text(parts.card, encoding="utf-8")
    for path in twins:
        (path / "1" / "model.onnx").hardlink_to(first / "1" / "model.onnx")
    for path in (*twins, first):
        (path / "config.pbtxt").write_text(render(config, bulk=path != first))
        _write_record(path, config, parts)
    return (*twins, first)


def _write_record(path: Path, config: ModelConfig, parts: Parts) -> None:
    record = Record(
        name=path.name,
        title=parts.title,
        task=config.task,
        precision=parts.precision,
        max_tokens=config.max_tokens,
        prompt_prefix=config.prompt_prefix,
        labels=config.labels,
        bulk_model=config.bulk_model,
        fingerprint=parts.fingerprint,
        files={file: sha256_file(path / file) for file in files_of(path)},
    )
    (path / RECORD).write_text(json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def files_of(path: Path) -> list[str]:
    """Return the relative names of a folder's files, without its record, sorted."""
    return sorted(
        file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file() and file.name != RECORD
    )


def publish(work: Path, repository: Path, staged: Path) -> None:
    """Move a finished folder into the repository, in place of the one of the same name."""
    target = repository / staged.name
    if target.exists():
        target.rename(work / f"{staged.name}.old")
    staged.rename(target)


def read_record(path: Path) -> Record | None:
    """Return a model folder's record, or None where there is none that can be read."""
    try:
        table = json.loads((path / RECORD).read_bytes())
        return Record(**{**table, "labels": tuple(table["labels"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def differences(path: Path, record: Record) -> list[str]:
    """Return one line for each file that is missing, damaged or not in the record; for a first model also a changed
    tokenizer hash in its config."""
    found = files_of(path)
    wrong = [f"{name} is missing" for name in record.files if name not in found]
    wrong += [f"{name} is not part of the build" for name in found if name not in record.files]
    wrong += [
        f"{name} has other content than was built"
        for name, digest in record.files.items()
        if name in found and sha256_file(path / name) != digest
    ]
    if (path / "tokenizer").is_dir() and tokenizer_sha256(path / "tokenizer") not in config_text(path):
        wrong.append("tokenizer/ does not match tokenizer_sha256 in config.pbtxt")
    return wrong


def config_text(path: Path) -> str:
    """Return a folder's config.pbtxt, empty where there is none."""
    try:
        return (path / "config.pbtxt").read_text(encoding="utf-8")
    except OSError:
        return ""
