"""Which models there are: a task that follows Triton's index and keeps spec, tokenizer and canary of each."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from serving.errors import ConfigError, DependencyDown, ModelNotReady, TwodoorError, UnknownModel, VersionGone
from serving.models import ModelSpec, check_twin, parse_spec, twin_of, version_file
from serving.postprocess import FloatArray
from serving.preprocess import IdArray, Tokenizer
from serving.settings import ModelSettings, TritonSettings
from serving.triton_client import ModelState, TritonClient, newest_first

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


@dataclass(frozen=True, slots=True)
class _Read:
    """What was made of one version that Triton has loaded: ``digest`` of its config, the model or why it was refused."""

    digest: bytes
    model: Model | None
    refused: ConfigError | None = None


class Registry:
    """Follows Triton. ``run`` is the task its owner awaits; ``get`` answers at once from what is known.

    Several versions of a model may be ready. New work is routed to one of them: to the one that the config's parameter
    ``serve_version`` names, else to the newest; one whose bulk twin is ready too goes before one whose twin is not.
    """

    def __init__(self, client: TritonClient, models: ModelSettings, triton: TritonSettings) -> None:
        self._client = client
        self._settings = models
        self._interval_s = triton.poll_interval_s
        self._read: dict[str, dict[str, _Read]] = {}
        self._routes: dict[str, tuple[Model, ...]] = {}
        self._known: frozenset[str] = frozenset()
        self._ready: dict[str, tuple[str, ...]] = {}
        self.triton_up = False
        self.seen = asyncio.Event()
        """Set once Triton's index has been read for the first time."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all models callers may use, ready or not; bulk twins are not among them."""
        return self._known

    def get(self, name: str, version: str | None = None) -> Model:
        """Return the version of a model that new work is routed to, or the given one.

        Raises DependencyDown where Triton is away, UnknownModel, ModelNotReady where no version is ready, and its
        subclass VersionGone where the given one is not but another is.
        """
        if not self.triton_up:
            raise DependencyDown("the model server does not answer")
        if name not in self._known:
            raise UnknownModel(f"no model named {name[:64]!r}")
        routes = self._routes.get(name, ())
        if not routes:
            raise ModelNotReady(f"model {name} is not ready")
        if version is None:
            return routes[0]
        for model in routes:
            if model.spec.version == version:
                return model
        raise VersionGone(f"version {version} of model {name} is not ready")

    def versions(self, name: str) -> tuple[str, ...]:
        """Return the ready versions of a model, the one for new work first; none where ``get`` would raise."""
        return tuple(model.spec.version for model in self._routes.get(name, ())) if self.triton_up else ()

    def bulk_ready(self, name: str, version: str | None = None) -> bool:
        """Return whether the instance that serves the bulk lane of the routed (or the given) version is ready."""
        if not self.triton_up:
            return False
        for model in self._routes.get(name, ()):
            if version in (None, model.spec.version):
                return model.spec.version in self._ready.get(model.spec.bulk_model, ())
        return False

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
        """Read the index once, and every version that is new or whose loaded config has changed."""
        if not self.triton_up:
            log.info("triton up", version=await self._client.server_version())
            # Whatever happened to the repository meanwhile: what is known of it may be of another model by the same name.
            self._read = {}
        states = await self._client.models()
        ready = {name: state.versions for name, state in states.items() if state.versions}
        # A version that went away may come back as another one: it is read again.
        self._read = {
            name: {version: read for version, read in known.items() if version in ready[name]}
            for name, known in self._read.items()
            if name in ready
        }
        twins = {spec.bulk_model for spec in self._specs() if spec.bulk_model != spec.name}
        for name, versions in ready.items():
            for version in versions:
                if name not in twins:
                    await self._look(name, version, ready, twins)
        self._refuse_at_start()
        self._publish(states, ready, twins)

    def _specs(self) -> Iterator[ModelSpec]:
        return (read.model.spec for known in self._read.values() for read in known.values() if read.model)

    def _publish(
        self, states: Mapping[str, ModelState], ready: dict[str, tuple[str, ...]], twins: AbstractSet[str]
    ) -> None:
        """Let callers see what was read, all of it at once."""
        self._ready = ready
        routes = {name: _in_order(known, ready) for name, known in self._read.items() if name not in twins}
        for name, models in routes.items():
            before, now = self._routes.get(name, ()), models[:1]
            if now and now[0].spec.version != (before[0].spec.version if before else None):
                log.info("model routed", model=name, version=now[0].spec.version)
        self._routes = routes
        self._known = frozenset(name for name in states if name not in twins and not _looks_like_twin(name, states))
        self.triton_up = True
        self.seen.set()

    def _refuse_at_start(self) -> None:
        """At start the operator is watching: stop where a model cannot be served. Later one must not end the others."""
        for known in self._read.values():
            refused = [read.refused for read in known.values() if read.refused]
            if refused and len(refused) == len(known) and not self.seen.is_set():
                raise refused[0]

    async def _look(self, name: str, version: str, ready: Mapping[str, tuple[str, ...]], twins: set[str]) -> None:
        """Read a version, unless it is known and has not changed."""
        try:
            digest = await self._client.config_digest(name, version)
            known = self._read.get(name, {}).get(version)
            if known and known.digest == digest:
                return
            config = await self._client.model_config(name, version)
            if twin_of(config):
                twins.add(name)
                return
            model = await self._load(name, version, config, ready)
        except ConfigError as exc:
            # What was known of it goes: Triton answers with the new one by now, and tokens and labels of the old one
            # would give wrong answers.
            self._read.setdefault(name, {})[version] = _Read(digest, None, exc)
            log.error("model refused", model=name, version=version, reason=str(exc))
        except TwodoorError as exc:
            log.info("model not readable yet", model=name, version=version, reason=str(exc))
        else:
            self._read.setdefault(name, {})[version] = _Read(digest, model)
            if model.spec.bulk_model != name:
                twins.add(model.spec.bulk_model)
            log.info("model ready", model=name, version=version)

    async def _load(
        self, name: str, version: str, config: Mapping[str, object], ready: Mapping[str, tuple[str, ...]]
    ) -> Model:
        model = await asyncio.to_thread(read_model, self._settings.repository / name, config, version)
        twin = model.spec.bulk_model
        if twin != name:
            same = version if version in ready.get(twin, ()) else ""
            check_twin(model.spec, await self._client.model_config(twin, same))
        return model


def _in_order(known: Mapping[str, _Read], ready: Mapping[str, tuple[str, ...]]) -> tuple[Model, ...]:
    """Return the versions that can be served, the one for new work first."""
    models = {version: known[version].model for version in newest_first(known)}
    wanted = next((model.spec.serve_version for model in models.values() if model and model.spec.serve_version), "")

    def rank(model: Model) -> tuple[bool, bool, int]:
        spec = model.spec
        return spec.version in ready.get(spec.bulk_model, ()), spec.version == wanted, int(spec.version)

    return tuple(sorted((model for model in models.values() if model), key=rank, reverse=True))


def _looks_like_twin(name: str, states: Mapping[str, object]) -> bool:
    """A twin that is not loaded has no config to read, so its name decides."""
    first = name.removesuffix("_bulk")
    return first != name and first in states


def read_model(folder: Path, config: Mapping[str, object], version: str) -> Model:
    """Read what belongs to a version, from the config Triton has loaded of it and the model's folder. Blocks.

    Raises ConfigError, whatever is wrong with its files.
    """
    try:
        spec = parse_spec(config, version, _read_labels(folder, config, version))
        tokenizer = Tokenizer(version_file(folder, version, "tokenizer"), spec)
        return Model(spec, tokenizer, _read_canary(folder, version))
    except ConfigError:
        raise
    except Exception as exc:  # the tokenizer's libraries name no errors of their own
        raise ConfigError(f"model {folder.name}: its config or files cannot be read: {exc}") from exc


def _read_labels(folder: Path, config: Mapping[str, object], version: str) -> list[str]:
    outputs = config.get("output")
    first = outputs[0] if isinstance(outputs, list) and outputs else {}
    name = first.get("label_filename") if isinstance(first, dict) else None
    if not name:
        return []
    try:
        return version_file(folder, version, str(name)).read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as exc:
        raise ConfigError(f"model {folder.name}: label file {name} cannot be read") from exc


def _read_canary(folder: Path, version: str) -> Canary | None:
    file = version_file(folder, version, "canary.json")
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        inputs = {name: np.asarray([ids], dtype=np.int64) for name, ids in content["inputs"].items()}
        values = np.asarray(content["output"]["values"], dtype=np.float32)
        return Canary(inputs, values, float(content["output"]["tolerance"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"model {folder.name}: canary.json is not a canary row") from exc
