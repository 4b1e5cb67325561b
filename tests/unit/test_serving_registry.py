"""What the registry makes of a model that changes, breaks or comes back, with a Triton that tells what it is told to."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from serving.errors import ConfigError, DependencyDown, ModelNotReady, UnknownModel, VersionGone
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
        self.versions: dict[str, tuple[str, ...]] = {}

    async def server_version(self) -> str:
        if not self.is_up:
            raise DependencyDown("away")
        return "2.51.0"

    async def models(self) -> dict[str, ModelState]:
        await self.server_version()
        return {name: ModelState(name, self.versions[name]) for name in self.configs}

    async def model_config(self, name: str, version: str) -> dict[str, Any]:
        return self.configs[name]

    async def config_digest(self, name: str, version: str) -> bytes:
        return json.dumps(self.configs[name], sort_keys=True).encode()


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
    made.versions["m"] = ("1",)
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
    triton.versions["m"] = ("2",)
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
    triton.versions["n"] = ("1",)
    await registry.refresh()
    assert registry.get("m").spec.name == "m"
    with pytest.raises(ModelNotReady):
        registry.get("n")


def serve(triton: FakeTriton, *ready: str, twin: tuple[str, ...] | None = None, **more: str) -> None:
    """Let model ``m``, and its twin, be ready in these versions; ``more`` are parameters of the first."""
    parameters = {**triton.configs["m"]["parameters"], "bulk_model": {"string_value": "m_bulk"}}
    parameters |= {key: {"string_value": value} for key, value in more.items()}
    triton.configs["m"] = {**triton.configs["m"], "parameters": parameters}
    triton.configs["m_bulk"] = config(
        name="m_bulk", parameters={"twin_of": {"string_value": "m"}}, optimization={"priority": "PRIORITY_MIN"}
    )
    triton.versions = {"m": ready, "m_bulk": ready if twin is None else twin}


@pytest.mark.parametrize(
    ("ready", "twin", "serve_version", "routed"),
    [
        ("1", "1", "", "1"),
        ("2 1", "2 1", "", "2 1"),
        ("10 9", "10 9", "", "10 9"),
        ("2 1", "2 1", "1", "1 2"),
        ("3 2 1", "3 2 1", "2", "2 3 1"),
        # A version whose bulk lane is missing comes last, also where it is the one to serve.
        ("2 1", "1", "", "1 2"),
        ("2 1", "1", "2", "1 2"),
        # What the config names is away: the newest.
        ("3 2", "3 2", "1", "3 2"),
        # The twin is away: callers of single texts are served on, by the same version.
        ("2 1", "", "1", "1 2"),
    ],
)
async def test_new_work_goes_to_the_version_that_the_config_names_or_the_newest_that_is_ready_in_both_lanes(
    registry: Registry, triton: FakeTriton, tmp_path: Path, ready: str, twin: str, serve_version: str, routed: str
) -> None:
    serve(triton, *ready.split(), twin=("1", "2", "3", "9", "10"), serve_version=serve_version)
    await registry.refresh()
    triton.versions["m_bulk"] = tuple(twin.split())
    await registry.refresh()
    assert registry.versions("m") == tuple(routed.split())
    assert registry.get("m").spec.version == routed.split()[0]
    assert [version for version in ready.split() if registry.bulk_ready("m", version)] == [
        version for version in ready.split() if version in twin.split()
    ]
    assert registry.bulk_ready("m") == bool(twin)


async def test_a_pinned_version_is_given_while_it_is_ready_and_then_is_gone_unlike_a_model_that_is_away(
    registry: Registry, triton: FakeTriton, tmp_path: Path
) -> None:
    serve(triton, "2", "1")
    await registry.refresh()
    assert registry.get("m", "1").spec.version == "1"
    triton.versions = {"m": ("2",), "m_bulk": ("2",)}
    await registry.refresh()
    with pytest.raises(VersionGone):
        registry.get("m", "1")
    assert not registry.bulk_ready("m", "1")
    triton.versions = {"m": (), "m_bulk": ()}
    await registry.refresh()
    with pytest.raises(ModelNotReady) as away:
        registry.get("m", "1")
    assert not isinstance(away.value, VersionGone)
    assert registry.versions("m") == ()
    with pytest.raises(UnknownModel):
        registry.get("n", "1")
    registry.triton_up = False
    with pytest.raises(DependencyDown):
        registry.get("m", "1")
    assert registry.versions("m") == ()


async def test_a_version_may_have_a_tokenizer_labels_and_canary_of_its_own(
    registry: Registry, triton: FakeTriton, tmp_path: Path
) -> None:
    own = tmp_path / "m" / "2"
    write_model(tmp_path, "bad good fine", "other")
    own.mkdir()
    (tmp_path / "other" / "tokenizer").rename(own / "tokenizer")
    (own / "labels.txt").write_text("no\nyes\n")
    row = {"inputs": {"input_ids": [1]}, "output": {"values": [0.0, 1.0], "tolerance": 0.1}}
    (own / "canary.json").write_text(json.dumps(row))
    hashes = {"tokenizer_sha256_2": tokenizer_sha256(own / "tokenizer")}
    serve(triton, "2", "1", **hashes)
    await registry.refresh()
    first, second = registry.get("m", "1"), registry.get("m", "2")
    assert (first.spec.labels, second.spec.labels) == (("negative", "positive"), ("no", "yes"))
    assert first.spec.tokenizer_sha256 != second.spec.tokenizer_sha256 == hashes["tokenizer_sha256_2"]
    assert first.canary is None
    assert second.canary is not None


async def test_a_version_whose_own_tokenizer_the_config_does_not_know_is_refused_and_the_other_served(
    registry: Registry, triton: FakeTriton, tmp_path: Path
) -> None:
    write_model(tmp_path, "bad good fine", "other")
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "other" / "tokenizer").rename(tmp_path / "m" / "2" / "tokenizer")
    serve(triton, "2", "1")
    await registry.refresh()  # also at the first look: one version of the model can be served
    assert registry.versions("m") == ("1",)


async def test_a_model_that_cannot_be_served_at_all_ends_a_door_at_its_start(
    registry: Registry, triton: FakeTriton, tmp_path: Path
) -> None:
    write_model(tmp_path, "bad good fine")
    with pytest.raises(ConfigError, match="tokenizer_sha256"):
        await registry.refresh()


async def test_a_model_that_was_loaded_again_under_its_version_with_another_config_is_read_again(
    registry: Registry, triton: FakeTriton, tmp_path: Path
) -> None:
    await registry.refresh()
    before = registry.get("m")
    await registry.refresh()
    assert registry.get("m") is before
    triton.configs["m"] = write_model(tmp_path, "bad good fine")
    await registry.refresh()
    assert registry.get("m").spec.tokenizer_sha256 != before.spec.tokenizer_sha256


async def test_switching_back_moves_new_work_though_the_same_versions_are_ready(
    registry: Registry, triton: FakeTriton, tmp_path: Path
) -> None:
    serve(triton, "2", "1", serve_version="2")
    await registry.refresh()
    serve(triton, "2", "1", serve_version="1")
    await registry.refresh()
    assert registry.versions("m") == ("1", "2")
