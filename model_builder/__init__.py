"""Makes the model repository: fetch ONNX and tokenizer, graft pooling or a head, verify.

Importing this package is cheap; onnx and onnxruntime are imported by the first call that needs them. Everything here
raises ``serving.errors.ConfigError`` with one clear line.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from model_builder.answers import BuiltModel, ModelInfo, VerifyResult
from serving.errors import ConfigError

__all__ = ["BuiltModel", "ConfigError", "ModelInfo", "VerifyResult", "add", "build", "list_models", "verify"]

# Official builds of ONNX Runtime report to their maker unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

CACHE = Path(".models-cache")


def build(
    repository: Path,
    cache: Path = CACHE,
    precision: str = "int8",
    models: Sequence[str] | None = None,
    progress: Callable[[str], None] = print,
) -> list[BuiltModel]:
    """Build the default models (or those named) and their bulk twins; see ``model_builder.builder.build``."""
    from model_builder import builder

    return builder.build(repository, cache, precision, models, progress)


def list_models(repository: Path) -> list[ModelInfo]:
    """Return the repository's models by name, without bulk twins."""
    from model_builder import listing

    return listing.list_models(repository)


def add(
    repository: Path,
    name: str,
    onnx: Path,
    tokenizer: Path,
    task: str,
    labels: Sequence[str] | Path | None = None,
    *,
    max_tokens: int | None = None,
    prompt_prefix: str = "",
    progress: Callable[[str], None] = print,
) -> BuiltModel:
    """Add a user's own model and its bulk twin; see ``model_builder.adding.add``."""
    from model_builder import adding

    return adding.add(repository, name, onnx, tokenizer, task, labels, max_tokens, prompt_prefix, progress)


def verify(repository: Path, sst2_dir: Path | None = None, models: Sequence[str] | None = None) -> list[VerifyResult]:
    """Check files, hashes, config, twin and canary; with ``sst2_dir`` also accuracy; see ``model_builder.verifying``."""
    from model_builder import verifying

    return verifying.verify(repository, sst2_dir, models)
