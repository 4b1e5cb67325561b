"""Which wanted models are gone for good: missing without interruption while Triton answers. Pure."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Models(Protocol):
    """What the registry tells of models."""

    @property
    def names(self) -> frozenset[str]:
        """Names in Triton's index, ready or not."""
        ...

    def versions(self, name: str) -> tuple[str, ...]:
        """The ready versions of a model."""
        ...


class Wanted(NamedTuple):
    """A model that open jobs need, in the version they have pinned (None: none yet)."""

    model: str
    version: str | None

    @property
    def code(self) -> str:
        """Why a job that wants it fails once it is gone."""
        return "unknown_model" if self.version is None else "model_gone"

    @property
    def message(self) -> str:
        """The same as a sentence for the caller."""
        if self.version is None:
            return f"no model named {self.model[:64]!r}"
        return f"version {self.version} of model {self.model[:64]}, which the job had pinned, is gone"


class GoneModels:
    """Remembers since when each wanted model has been missing."""

    def __init__(self, gone_s: float) -> None:
        self._gone_s = gone_s
        self._since_s: dict[Wanted, float] = {}
        self._looked_at_s: float | None = None

    def forget(self) -> None:
        """Triton does not answer: what was missing may be back when it does."""
        self._since_s = {}

    def look(self, wanted: Mapping[str, frozenset[str | None]], models: Models, now_s: float) -> list[Wanted]:
        """Return what has been missing for ``gone_s``. After a gap between two looks, counting starts anew."""
        if self._looked_at_s is not None and now_s - self._looked_at_s > max(1.0, self._gone_s / 2):
            self.forget()
        self._looked_at_s = now_s
        missing = [
            one
            for model, versions in wanted.items()
            for one in (Wanted(model, version) for version in versions)
            if is_missing(one, models)
        ]
        self._since_s = {one: self._since_s.get(one, now_s) for one in missing}
        return [one for one, since_s in self._since_s.items() if now_s - since_s >= self._gone_s]


def is_missing(one: Wanted, models: Models) -> bool:
    """Whether Triton has no such model, or serves it in other versions only. One that loads or is not ready is not missing."""
    if one.model not in models.names:
        return True
    ready = models.versions(one.model)
    return one.version is not None and bool(ready) and one.version not in ready
