"""Which models there are: a task that follows Triton's index and keeps spec, tokenizer and canary of each."""

import asyncio
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from serving.errors import ConfigError, DependencyDown, ModelNotReady, TwodoorError, UnknownModel, VersionGone
from serving.model_files import Canary, Model, read_model
from serving.models import ModelSpec, check_twin, instances_of, twin_of
from serving.read_ahead import ReadAhead
from serving.settings import ModelSettings, TritonSettings
from serving.startup import Phase
from serving.triton_client import ModelState, TritonClient, newest_first

__all__ = ["Canary", "Model", "Registry", "read_model"]

log = structlog.get_logger(__name__)

# While Triton is away somebody may be waiting for its start, and to ask costs next to nothing.
_AWAY_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Read:
    """What was made of one version that Triton has loaded: ``digest`` of its config, the model or why it was refused.

    ``is_whole``: its bulk twin was looked at too; it may come later, and callers need not wait for it.
    """

    digest: bytes
    model: Model | None = None
    is_whole: bool = True
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
        self._ahead = ReadAhead(models.repository, models.default)
        self._awaited = Phase("triton")
        self._on_disk = _names_on_disk(models.repository) | {models.default}
        self._ready: dict[str, tuple[str, ...]] = {}
        self.triton_up = False
        self.seen = asyncio.Event()
        """Set once Triton's index has been read for the first time."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all models callers may use, ready or not; bulk twins are not among them."""
        return self._known

    @property
    def expected(self) -> frozenset[str]:
        """The same names, and until Triton was seen for the first time those of the repository's folders."""
        return self._known if self.seen.is_set() else self._on_disk

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
        """Follow the index until cancelled. A config that is wrong at the first look raises ConfigError.

        Tokenizers are read in a thread while Triton is still on its way.
        """
        async with self._ahead:
            await self._follow()

    async def _follow(self) -> None:
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
            await asyncio.sleep(self._interval_s if self.triton_up else min(self._interval_s, _AWAY_INTERVAL_S))

    async def refresh(self) -> None:
        """Read the index once, and every version that is new or whose loaded config has changed."""
        if not self.triton_up:
            version = await self._client.server_version()
            self._awaited.done()
            log.info("triton up", version=version)
            # Whatever happened to the repository meanwhile: what is known of it may be of another model by the same name.
            self._read = {}
        reading, is_first = Phase("models"), not self.seen.is_set()
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
        if is_first:
            self._ahead.drop()
            reading.done()

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
                if known.model and not known.is_whole:
                    self._read[name][version] = _Read(digest, *await self._with_twin(known.model, ready))
                return
            config = await self._client.model_config(name, version)
            if twin_of(config):
                twins.add(name)
                return
            loaded = await self._ahead.so_far()
            model = await asyncio.to_thread(read_model, self._settings.repository / name, config, version, loaded)
            read = _Read(digest, *await self._with_twin(model, ready))
        except ConfigError as exc:
            # What was known of it goes: Triton answers with the new one by now, and tokens and labels of the old one
            # would give wrong answers.
            self._read.setdefault(name, {})[version] = _Read(digest, refused=exc)
            log.error("model refused", model=name, version=version, reason=str(exc))
        except TwodoorError as exc:
            log.info("model not readable yet", model=name, version=version, reason=str(exc))
        else:
            self._read.setdefault(name, {})[version] = read
            if model.spec.bulk_model != name:
                twins.add(model.spec.bulk_model)
            log.info("model ready", model=name, version=version)

    async def _with_twin(self, model: Model, ready: Mapping[str, tuple[str, ...]]) -> tuple[Model, bool]:
        """Return the model with what its bulk twin says of itself, and False while that is not ready.

        Raises ConfigError where the two do not fit.
        """
        twin, version = model.spec.bulk_model, model.spec.version
        if twin == model.spec.name:
            return model, True
        if twin not in ready:
            return model, False
        config = await self._client.model_config(twin, version if version in ready[twin] else "")
        check_twin(model.spec, config)
        return replace(model, spec=replace(model.spec, bulk_instances=instances_of(config))), True


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


def _names_on_disk(repository: Path) -> frozenset[str]:
    names = dict.fromkeys(path.parent.name for path in repository.glob("*/config.pbtxt"))
    return frozenset(name for name in names if not _looks_like_twin(name, names))
