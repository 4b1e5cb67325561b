"""Check a repository's models again: files, hashes, config, twin, canary; with SST-2 also accuracy and flips."""

import json
from collections.abc import Sequence
from pathlib import Path

from model_builder import canary, sst2
from model_builder.answers import VerifyResult
from model_builder.config import default_cores, twin_name
from model_builder.folder import Record, differences, read_record
from model_builder.listing import MODEL_FILE, list_models, served_version, versions_of
from model_builder.measure import accuracy, invariance
from model_builder.recipes import SENTIMENT
from model_builder.run import Runner
from model_builder.tokens import Encoder
from serving.errors import ConfigError
from serving.models import version_file

LEAST_ACCURACY = 0.895
LARGEST_CHANGE = 1e-4
# FP16 rounds differently in another shape of batch: its scores move a little, and close calls may flip.
LARGEST_CHANGE_FP16 = 0.05


def verify(repository: Path, sst2_dir: Path | None = None, models: Sequence[str] | None = None) -> list[VerifyResult]:
    """Check the models (or those named). Raises ConfigError for an empty repository or an unknown name.

    With ``sst2_dir`` holding test.tsv, sentiment_model is also run over the test sentences, about a minute.
    """
    names = [info.name for info in list_models(repository)]
    unknown = [name for name in models or () if name not in names]
    if unknown:
        raise ConfigError(f"no model {unknown[0]} in {repository}: there are {', '.join(names) or 'none'}")
    if not names:
        raise ConfigError(f"no model in {repository}: `twodoor models build` makes the default ones")
    return [_verify_one(repository / name, sst2_dir) for name in names if not models or name in models]


def _verify_one(path: Path, sst2_dir: Path | None) -> VerifyResult:
    record = read_record(path)
    if record is None:
        return VerifyResult(path.name, ("not made by model_builder: nothing to compare with",), ())
    problems = differences(path, record) + _twin_problems(path, record)
    passed: list[str] = []
    if not problems:
        twin = "" if record.bulk_model == record.name else " and the bulk twin"
        passed.append(f"{len(record.files)} files{twin} as built")
        runners = {version: Runner(path / version / MODEL_FILE, default_cores()) for version in versions_of(path)}
        for version, one in runners.items():
            deviation = canary.deviation(one, json.loads(version_file(path, version, "canary.json").read_bytes()))
            line = f"canary within {deviation:.1e}" + (f" (version {version})" if len(runners) > 1 else "")
            (passed if deviation <= canary.TOLERANCE else problems).append(line)
        runner = runners[served_version(path)]
        if record.name == SENTIMENT.name and sst2_dir is not None and (sst2_dir / "test.tsv").is_file():
            right, wrong = _sentences(path, record, runner, sst2_dir)
            passed += right
            problems += wrong
    return VerifyResult(path.name, tuple(passed), tuple(problems))


def _twin_problems(path: Path, record: Record) -> list[str]:
    if record.bulk_model == record.name:
        return []
    twin = path.parent / twin_name(record.name)
    own = read_record(twin)
    if own is None:
        return [f"the bulk twin {twin.name} is missing or was not built"]
    problems = [f"{twin.name}: {line}" for line in differences(twin, own)]
    # A version that was not switched to yet is not in the twin.
    shared = [name for name in record.files if name.endswith(f"/{MODEL_FILE}") and name in own.files]
    served = f"{served_version(path)}/{MODEL_FILE}"
    if served not in shared or any(own.files[name] != record.files[name] for name in shared):
        problems.append(f"{twin.name} holds another model.onnx")
    return problems


def _sentences(path: Path, record: Record, runner: Runner, sst2_dir: Path) -> tuple[list[str], list[str]]:
    split = sst2.read(sst2_dir / "test.tsv")
    found = invariance(
        runner, Encoder(version_file(path, served_version(path), "tokenizer"), record.prompt_prefix)(split.texts)
    )
    alone, batched = (accuracy(outputs, split.labels) for outputs in (found.alone, found.batched))
    half = record.precision == "fp16"
    checks = [
        (f"accuracy on SST-2 {alone:.4f} alone, {batched:.4f} in batches", min(alone, batched) >= LEAST_ACCURACY),
        (f"{found.flips} labels flip with batch or padding", found.flips == 0 or half),
        (
            f"largest change of a logit {found.largest_change:.1e}",
            found.largest_change <= (LARGEST_CHANGE_FP16 if half else LARGEST_CHANGE),
        ),
    ]
    return [line for line, good in checks if good], [line for line, good in checks if not good]
