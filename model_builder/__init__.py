"""Makes the model repository: fetch ONNX and tokenizer, graft pooling or a head, verify.

Importing this package is cheap; onnx and onnxruntime are imported by the first call that needs them. Everything here
raises ``serving.errors.ConfigError`` with one clear line; ``switch`` also DependencyDown.
"""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from model_builder.answers import BuiltModel, ModelInfo, Switched, VerifyResult
from serving.errors import ConfigError, DependencyDown

__all__ = [
    "BuiltModel", "ConfigError", "DependencyDown", "ModelInfo", "Switched", "VerifyResult",
    "add", "build", "list_models", "switch", "verify",
]  # fmt: skip

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
    version: str | None = None,
    has_twin: bool = True,
) -> BuiltModel:
    """Add a user's own model and its bulk twin, or a ``version`` of one that is there; see ``model_builder.adding.add``.

    A version takes ``max_tokens``, ``prompt_prefix`` and whether there is a twin from its model.
    """
    from model_builder import adding, adding_version

    if version is not None:
        return adding_version.add_version(repository, name, onnx, tokenizer, task, labels, version, progress)
    return adding.add(
        repository, name, onnx, tokenizer, task, labels, max_tokens, prompt_prefix, progress, has_twin=has_twin
    )


def verify(repository: Path, sst2_dir: Path | None = None, models: Sequence[str] | None = None) -> list[VerifyResult]:
    """Check files, hashes, config, twin and canary; with ``sst2_dir`` also accuracy; see ``model_builder.verifying``."""
    from model_builder import verifying

    return verifying.verify(repository, sst2_dir, models)


def switch(
    repository: Path,
    name: str,
    version: str,
    *,
    triton_address: str,
    pinned: Callable[[], Collection[str] | None],
    timeout_s: float,
    progress: Callable[[str], None] = print,
    settle_s: float = 4.0,
) -> Switched:
    """Route a model that serves to another version of it; see ``model_builder.switching.switch``."""
    import asyncio

    from model_builder import switching

    return asyncio.run(
        switching.switch(
            repository, name, version,
            triton_address=triton_address, pinned=pinned, timeout_s=timeout_s, progress=progress, settle_s=settle_s,
        )
    )  # fmt: skip
