"""Build the default models into a repository; a second build with nothing to do only compares checksums."""

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from model_builder import canary, card, tables
from model_builder.answers import BuiltModel
from model_builder.config import FIRST_VERSION, ModelConfig, default_cores, twin_name
from model_builder.folder import Parts, differences, publish, read_record, staging, write
from model_builder.listing import MODEL_FILE, served_version, versions_of
from model_builder.recipes import PRECISIONS, RECIPES, Precision, Recipe, build_graph
from model_builder.run import Runner
from model_builder.sources import Fetched, fetch
from model_builder.tokens import Encoder, write_bert_folder
from serving.errors import ConfigError
from serving.models import tokenizer_sha256

Progress = Callable[[str], None]
# Modules that say what a built folder holds. A change in one of them makes the default models anew.
_CODE = ("canary", "card", "config", "folder", "graph", "quantize", "recipes", "tokens")


def build(
    repository: Path,
    cache: Path,
    precision: str = "int8",
    models: Sequence[str] | None = None,
    progress: Progress = print,
    cores: int | None = None,
) -> list[BuiltModel]:
    """Build the default models (or those named) with their bulk twins.

    ``int8`` is the static INT8 of sentiment_model; embedding_model has none and stays FP32. ``cores`` is the number of
    threads and of bulk instances, by default this machine's cores up to four. Raises ConfigError with one clear line.
    """
    chosen = _choose(models)
    wanted = PRECISIONS.get(precision)
    if wanted is None:
        raise ConfigError(f"precision is {precision!r}, expected {', '.join(PRECISIONS)}")
    count = cores or default_cores()
    with staging(repository) as work:
        return [_build_one(recipe, repository, cache, wanted, count, work, progress) for recipe in chosen]


def _choose(models: Sequence[str] | None) -> list[Recipe]:
    known = {recipe.name: recipe for recipe in RECIPES}
    unknown = [name for name in models or () if name not in known]
    if unknown:
        raise ConfigError(f"no default model {unknown[0]!r}: there are {', '.join(known)}")
    return [known[name] for name in (models or known)]


def _build_one(
    recipe: Recipe, repository: Path, cache: Path, precision: Precision, cores: int, work: Path, progress: Progress
) -> BuiltModel:
    effective = recipe.effective(precision)
    fingerprint = _fingerprint(recipe, effective, cores)
    path = repository / recipe.name
    if _is_current(repository, recipe.name, fingerprint):
        progress(f"{recipe.name} ({effective}): up to date")
        return BuiltModel(recipe.name, path, effective, _size(path), changed=False)
    if own := [number for number in versions_of(path) if number != FIRST_VERSION]:
        # A build replaces the folder; what somebody put there is not ours to remove.
        progress(f"{recipe.name}: stays as it is, it has version {', '.join(own)}; to build it anew remove its folders")
        return BuiltModel(recipe.name, path, effective, _size(path), changed=False)
    files = fetch(recipe.source, cache, progress)
    progress(f"building {recipe.name} ({effective})")
    config, parts = _make(recipe, files, effective, cores, fingerprint, work)
    # The twin goes first: the model that names it never stands there alone.
    for folder in write(work, config, parts):
        publish(work, repository, folder)
    progress(f"{recipe.name} ({effective}): built, {_size(path) / 1e6:.0f} MB")
    return BuiltModel(recipe.name, path, effective, _size(path), changed=True, download_s=files.download_s)


def _make(
    recipe: Recipe, files: Fetched, precision: Precision, cores: int, fingerprint: str, work: Path
) -> tuple[ModelConfig, Parts]:
    tokenizer = work / f"{recipe.name}.tokenizer"
    write_bert_folder(files.tokenizer, tokenizer, recipe.max_tokens)
    encode = Encoder(tokenizer, recipe.prompt_prefix)
    model = build_graph(recipe, files.onnx, precision, encode, cores)
    content = model.SerializeToString(deterministic=True)
    runner = Runner(content, cores)
    config = ModelConfig(
        name=recipe.name,
        task=recipe.task,
        output=recipe.output,
        output_size=model.graph.output[0].type.tensor_type.shape.dim[1].dim_value,
        max_tokens=recipe.max_tokens,
        prompt_prefix=recipe.prompt_prefix,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        labels=recipe.labels,
        cores=cores,
        for_gpu=precision == "fp16",
    )
    parts = Parts(
        title=recipe.title,
        precision=precision,
        fingerprint=fingerprint,
        onnx=content,
        tokenizer=tokenizer,
        canary=canary.make(runner, encode, recipe.output),
        card=card.default_card(recipe.name, recipe.title, recipe.source.coordinates, precision, _facts(recipe, config)),
    )
    return config, parts


def _facts(recipe: Recipe, config: ModelConfig) -> dict[str, str]:
    facts = {
        "task": recipe.task,
        "inputs": "`input_ids`, `attention_mask` INT64 [-1]; token types are zeros inside the graph",
        "output": f"`{config.output}` FP32 [{config.output_size}]",
        "most tokens": str(recipe.max_tokens),
        "prefix put before each text": f"`{recipe.prompt_prefix}`" if recipe.prompt_prefix else "none",
        "bulk twin": f"`{twin_name(recipe.name)}`, the same file",
    }
    if recipe.labels:
        facts["labels"] = ", ".join(recipe.labels)
        facts["head"] = "`python -m model_builder.train_head` makes its weights again"
    if recipe.has_int8:
        facts["INT8 ranges"] = "`python -m model_builder.calibrate` makes the table again"
    return facts


def _is_current(repository: Path, name: str, fingerprint: str) -> bool:
    for path in (repository / name, repository / twin_name(name)):
        record = read_record(path)
        if record is None or record.fingerprint != fingerprint or differences(path, record):
            return False
    return True


def _fingerprint(recipe: Recipe, precision: str, cores: int) -> str:
    here = Path(__file__).parent
    files = [here / f"{name}.py" for name in _CODE]
    files += [path for path in (tables.HEAD, tables.RANGES, tables.MEASURED) if path.is_file()]
    facts = {
        "model": recipe.name,
        "precision": precision,
        "cores": cores,
        "source": [recipe.source.onnx.sha256, recipe.source.tokenizer.sha256],
        "libraries": {name: version(name) for name in ("onnx", "onnxruntime")},
        "code": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int:
    return (path / served_version(path) / MODEL_FILE).stat().st_size
