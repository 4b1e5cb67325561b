"""What the registry makes of a model that changes, breaks or comes back, with a Triton that tells what it is told to."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from serving.errors import DependencyDown, ModelNotReady
from serving.models import tokenizer_sha256
from serving.registry import Registry
from serving.settings import ModelSettings, TritonSettings, load
from serving.triton_client import ModelState
from tests.unit.test_serving_models import config


class FakeTriton:
    """The repository as Triton tells of it."""

    def __init__(self) -> None:
        self.is_up = True
        self.configs: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, str] = {}

    async def server_version(self) -> str:
        if not self.is_up:
            raise DependencyDown("away")
        return "2.51.0"

    async def models(self) -> dict[str, ModelState]:
        await self.server_version()
        return {name: ModelState(name, self.versions[name]) for name in self.configs}

    async def model_config(self, name: str, version: str) -> dict[str, Any]:
        return self.configs[name]


def write_model(folder: Path, words: str, name: str = "m") -> dict[str, Any]:
    """Write a model's tokenizer and labels; returns its config."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / name / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / name / "tokenizer" / "tokenizer.json"))
    (folder / name / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / name / "labels.txt").write_text("negative\npositive\n")
    return model_config(folder, name)


def model_config(folder: Path, name: str) -> dict[str, Any]:
    parameters = {
        "task": "classify",
        "max_tokens": "64",
        "tokenizer_sha256": tokenizer_sha256(folder / name / "tokenizer"),
        "bulk_model": name,
    }
    return config(name=name, parameters={key: {"string_value": value} for key, value in parameters.items()})


@pytest.fixture
def triton(tmp_path: Path) -> FakeTriton:
    made = FakeTriton()
    made.configs["m"] = write_model(tmp_path, "good bad")
    made.versions["m"] = "1"
    return made


@pytest.fixture
def registry(triton: FakeTriton, tmp_path: Path) -> Registry:
    fake: Any = triton
    settings: dict[str, Any] = {"repository": tmp_path}
    return Registry(fake, ModelSettings(**settings), load(TritonSettings))


async def go_away_and_come_back(registry: Registry, triton: FakeTriton) -> None:
    triton.is_up = False
    with pytest.raises(DependencyDown):
        await registry.refresh()
    registry.triton_up = False
    triton.is_up = True
    await registry.refresh()


async def test_a_server_that_comes_back_with_another_model_by_the_same_name_and_version_is_read_anew(
    registry: Registry, triton: FakeTriton, tmp_path: Path
) -> None:
    await registry.refresh()
    before = registry.get("m").spec.tokenizer_sha256
    triton.configs["m"] = write_model(tmp_path, "bad good fine")
    await go_away_and_come_back(registry, triton)
    assert registry.get("m").spec.tokenizer_sha256 != before


async def test_a_new_version_that_is_refused_is_not_served_with_what_the_old_one_had(
    registry: Registry, triton: FakeTriton, tmp_path: Path
) -> None:
    await registry.refresh()
    write_model(tmp_path, "bad good fine")  # the files are new, the config still has the hash of the old ones
    triton.versions["m"] = "2"
    await registry.refresh()
    with pytest.raises(ModelNotReady):
        registry.get("m")


@pytest.mark.parametrize("broken", ["tokenizer", "labels", "canary", "parameter"])
async def test_a_model_that_cannot_be_read_does_not_end_the_others(
    registry: Registry, triton: FakeTriton, tmp_path: Path, broken: str
) -> None:
    await registry.refresh()
    write_model(tmp_path, "good bad", "n")
    if broken == "tokenizer":
        (tmp_path / "n" / "tokenizer" / "tokenizer.json").write_text("{}")
    elif broken == "labels":
        (tmp_path / "n" / "labels.txt").write_bytes(b"\xff\n\xfe\n")
    elif broken == "canary":
        (tmp_path / "n" / "canary.json").write_text(json.dumps({"inputs": [1], "output": {}}))
    triton.configs["n"] = model_config(tmp_path, "n")
    if broken == "parameter":
        triton.configs["n"]["parameters"]["bulk_batch_ms"] = {"string_value": "soon"}
    triton.versions["n"] = "1"
    await registry.refresh()
    assert registry.get("m").spec.name == "m"
    with pytest.raises(ModelNotReady):
        registry.get("n")
