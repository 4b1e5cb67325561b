"""Which models there are: a task that follows Triton's index and keeps spec, tokenizer and canary of each."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from serving.errors import ConfigError, DependencyDown, ModelNotReady, TwodoorError, UnknownModel
from serving.models import ModelSpec, check_twin, parse_spec, twin_of
from serving.postprocess import FloatArray
from serving.preprocess import IdArray, Tokenizer
from serving.settings import ModelSettings, TritonSettings
from serving.triton_client import TritonClient

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Canary:
    """One known row: input tensors of shape [1, tokens] and the output it must give within ``tolerance``."""

    inputs: Mapping[str, IdArray]
    values: FloatArray
    tolerance: float


@dataclass(frozen=True, slots=True)
class Model:
    """A model a caller may name."""

    spec: ModelSpec
    tokenizer: Tokenizer
    canary: Canary | None


class Registry:
    """Follows Triton. ``run`` is the task its owner awaits; ``get`` answers at once from what is known."""

    def __init__(self, client: TritonClient, models: ModelSettings, triton: TritonSettings) -> None:
        self._client = client
        self._settings = models
        self._interval_s = triton.poll_interval_s
        self._models: dict[str, Model] = {}
        self._known: frozenset[str] = frozenset()
        self._ready: frozenset[str] = frozenset()
        self._refused: dict[str, str] = {}
        self.triton_up = False
        self.seen = asyncio.Event()
        """Set once Triton's index has been read for the first time."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all models callers may use, ready or not; bulk twins are not among them."""
        return self._known

    def get(self, name: str) -> Model:
        """Return a ready model; raises DependencyDown, UnknownModel or ModelNotReady."""
        if not self.triton_up:
            raise DependencyDown("the model server does not answer")
        if name not in self._known:
            raise UnknownModel(f"no model named {name[:64]!r}")
        model = self._models.get(name)
        if model is None or name not in self._ready:
            raise ModelNotReady(f"model {name} is not ready")
        return model

    def bulk_ready(self, name: str) -> bool:
        """Return whether the instance that serves the model's bulk lane is ready."""
        model = self._models.get(name)
        return self.triton_up and model is not None and model.spec.bulk_model in self._ready

    async def run(self) -> None:
        """Follow the index until cancelled. A config that is wrong at the first look raises ConfigError."""
        told = False
        while True:
            try:
                await self.refresh()
            except ConfigError:
                raise
            except TwodoorError as exc:
                if not told:
                    log.warning("triton away", reason=str(exc))
                told, self.triton_up = True, False
            else:
                told = False
            await asyncio.sleep(self._interval_s)

    async def refresh(self) -> None:
        """Read the index once and load what is new or has changed version."""
        if not self.triton_up:
            log.info("triton up", version=await self._client.server_version())
            # Whatever happened to the repository meanwhile: what is known of it may be of another model by the same name.
            self._models, self._refused = {}, {}
        states = await self._client.models()
        ready = {name: state.version for name, state in states.items() if state.version is not None}
        # A model that went away may come back as another one under the same version: it is read again.
        self._models = {name: model for name, model in self._models.items() if name in ready}
        self._refused = {name: version for name, version in self._refused.items() if name in ready}
        twins = {model.spec.bulk_model for name, model in self._models.items() if model.spec.bulk_model != name}
        for name, version in ready.items():
            known = self._models.get(name)
            if name in twins or self._refused.get(name) == version or (known and known.spec.version == version):
                continue
            await self._load(name, version, twins)
        self._ready = frozenset(ready)
        self._known = frozenset(
            name for name in states if name not in twins and not self._looks_like_twin(name, states)
        )
        self.triton_up = True
        self.seen.set()

    def _looks_like_twin(self, name: str, states: Mapping[str, object]) -> bool:
        """A twin that is not loaded has no config to read, so its name decides."""
        first = name.removesuffix("_bulk")
        return first != name and first in states

    async def _load(self, name: str, version: str, twins: set[str]) -> None:
        try:
            config = await self._client.model_config(name, version)
            if twin_of(config):
                twins.add(name)
                return
            model = await asyncio.to_thread(_read_model, self._settings.repository / name, config, version)
            if model.spec.bulk_model != name:
                check_twin(model.spec, await self._client.model_config(model.spec.bulk_model, ""))
                twins.add(model.spec.bulk_model)
            self._models[name] = model
            log.info("model ready", model=name, version=version)
        except ConfigError as exc:
            # At start the operator is watching: stop. Later one wrong model must not end the others.
            if not self.seen.is_set():
                raise
            # Triton answers with the new version by now: tokens and labels of the old one would give wrong answers.
            self._models.pop(name, None)
            self._refused[name] = version
            log.error("model refused", model=name, version=version, reason=str(exc))
        except TwodoorError as exc:
            log.info("model not readable yet", model=name, version=version, reason=str(exc))


def _read_model(folder: Path, config: Mapping[str, object], version: str) -> Model:
    """Read what belongs to a model; runs in a thread. Raises ConfigError, whatever is wrong with its files."""
    try:
        spec = parse_spec(config, version, _read_labels(folder, config))
        return Model(spec, Tokenizer(folder / "tokenizer", spec), _read_canary(folder))
    except ConfigError:
        raise
    except Exception as exc:  # the tokenizer's libraries name no errors of their own
        raise ConfigError(f"model {folder.name}: its config or files cannot be read: {exc}") from exc


def _read_labels(folder: Path, config: Mapping[str, object]) -> list[str]:
    outputs = config.get("output")
    first = outputs[0] if isinstance(outputs, list) and outputs else {}
    name = first.get("label_filename") if isinstance(first, dict) else None
    if not name:
        return []
    try:
        return (folder / str(name)).read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as exc:
        raise ConfigError(f"model {folder.name}: label file {name} cannot be read") from exc


def _read_canary(folder: Path) -> Canary | None:
    file = folder / "canary.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        inputs = {name: np.asarray([ids], dtype=np.int64) for name, ids in content["inputs"].items()}
        values = np.asarray(content["output"]["values"], dtype=np.float32)
        return Canary(inputs, values, float(content["output"]["tolerance"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"model {folder.name}: canary.json is not a canary row") from exc
