"""What makes a start short: the default model first, its twin later, and phases that a log tells."""

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from benchmarks.cold_start import _gateway_phases, _triton_phases
from local_stack.triton.health import TritonApi
from local_stack.triton.loading import Loading
from serving.errors import ConfigError
from serving.registry import Registry
from serving.settings import ModelSettings, TritonSettings, load
from serving.startup import process_age_s
from tests.unit.test_serving_registry import FakeTriton, write_model

NAMES = ("a", "a_bulk", "b", "b_bulk")


class FakeApi:
    def __init__(self, *, answers: bool = True) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def load(self, model: str, timeout_s: float) -> str | None:
        self.asked.append(model)
        if not self.answers:
            raise httpx.ConnectError("gone")
        return "it does not load" if model == "b" else None


def loading(repository: Path, default: str, *, staged: bool = True) -> Loading:
    for name in NAMES:
        (repository / name).mkdir(exist_ok=True)
        (repository / name / "config.pbtxt").touch()
    return Loading(repository, default, staged=staged)


def ask(rest: Loading, api: FakeApi) -> list[str]:
    asyncio.run(rest.load_rest(cast("TritonApi", api), 1.0))
    return api.asked


def test_triton_starts_with_the_default_model_and_is_asked_for_the_others_once_after_each_start(tmp_path: Path) -> None:
    models, api = loading(tmp_path, "b"), FakeApi()
    for start in (1, 2):
        assert models.begin() == ("b",)
        assert models.names == NAMES
        assert ask(models, api) == ["a", "a_bulk", "b_bulk"] * start
        assert ask(models, api) == ["a", "a_bulk", "b_bulk"] * start


@pytest.mark.parametrize(("default", "staged"), [("b", False), ("not there", True)])
def test_without_a_default_model_or_the_setting_triton_starts_with_all(
    tmp_path: Path, default: str, staged: bool
) -> None:
    models = loading(tmp_path, default, staged=staged)
    assert models.begin() == NAMES
    assert ask(models, FakeApi()) == []


def test_a_triton_that_dies_while_it_loads_is_no_answer(tmp_path: Path) -> None:
    models = loading(tmp_path, "a")
    models.begin()
    with pytest.raises(httpx.ConnectError):
        ask(models, FakeApi(answers=False))
    # It was only the connection: without being asked again a model would be missing until the start is given up.
    assert ask(models, FakeApi()) == ["a_bulk", "b", "b_bulk"]


class Seen:
    """A registry that has looked at a model whose twin is named and not loaded yet."""

    def __init__(self, folder: Path) -> None:
        self.triton = FakeTriton()
        config = write_model(folder, "good bad", "m")
        config["parameters"]["bulk_model"] = {"string_value": "m_bulk"}
        self.triton.configs = {"m": config, "m_bulk": config}
        self.triton.versions = {"m": ("1",), "m_bulk": ()}
        models: dict[str, Any] = {"repository": folder}
        self.registry = Registry(cast("Any", self.triton), ModelSettings(**models), load(TritonSettings))

    def look(self) -> None:
        asyncio.run(self.registry.refresh())

    def twin(self, **changes: object) -> None:
        first = self.triton.configs["m"]
        parameters = {**first["parameters"], "twin_of": {"string_value": "m"}}
        twin = first | {"name": "m_bulk", "parameters": parameters, "optimization": {"priority": "PRIORITY_MIN"}}
        self.triton.configs["m_bulk"] = twin | changes
        self.triton.versions["m_bulk"] = ("1",)


def test_callers_are_answered_before_the_bulk_twin_is_there(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    seen.look()
    before = seen.registry.get("m")
    assert not seen.registry.bulk_ready("m")
    seen.twin(instance_group=[{"count": 3}])
    seen.look()
    assert seen.registry.bulk_ready("m")
    assert seen.registry.get("m").tokenizer is before.tokenizer
    assert seen.registry.get("m").spec.bulk_instances == 3
    assert seen.registry.names == {"m"}


def test_a_twin_that_comes_later_and_does_not_fit_is_refused_with_its_model(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    seen.look()
    seen.twin(optimization={"priority": "PRIORITY_MAX"})
    seen.look()
    with pytest.raises(Exception, match="not ready") as refused:
        seen.registry.get("m")
    assert not isinstance(refused.value, ConfigError)


def test_phases_are_read_from_the_logs_of_triton_and_gateway() -> None:
    lines = [
        '0101 10:00:01.000000 7 model_lifecycle.cc:472] "loading: m:1"',
        '0101 10:00:02.500000 7 model.py:168] "startup instance=m_0_0 phase=load seconds=0.2 provider=CPUExecutionProvider"',
        "0101 10:00:03.000000 7 model_lifecycle.cc:839] \"successfully loaded 'm'\"",
        '0101 10:00:03.250000 7 grpc_server.cc:2558] "Started GRPCInferenceService at 127.0.0.1:1"',
    ]
    found = _triton_phases("\n".join(f"I{line}" for line in lines), 0.0, "m")
    assert list(found.values())[1:] == pytest.approx([1.5, 0.5, 0.25])
    gateway = _gateway_phases('plain text\n{"event": "startup", "phase": "imports", "seconds": 1.25, "age_s": 1.3}\n')
    assert gateway["gateway: imports"] == 1.25


def test_a_process_knows_its_age() -> None:
    first = process_age_s()
    assert 0 < first <= process_age_s() < 10_000
