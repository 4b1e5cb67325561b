"""What the builder's functions answer; cheap to import."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BuiltModel:
    """One model of the repository after a build or an add; ``changed`` is False where nothing had to be done."""

    name: str
    path: Path
    precision: str
    size_bytes: int
    changed: bool
    download_s: float = 0.0


@dataclass(frozen=True)
class ModelInfo:
    """One model of the repository as its folder tells. ``made_here`` is False for a folder the builder did not make;
    ``version`` is the one that serves new work."""

    name: str
    task: str
    precision: str
    max_tokens: int
    labels: tuple[str, ...]
    bulk_model: str
    size_bytes: int
    made_here: bool
    version: str


@dataclass(frozen=True)
class VerifyResult:
    """What was checked of one model: lines that say what is right, and what is wrong."""

    name: str
    passed: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


@dataclass(frozen=True)
class Switched:
    """A model that was routed to a version. ``retired``: the old ones are unloaded; else ``reason`` says why not yet."""

    name: str
    version: str
    previous: tuple[str, ...]
    retired: bool
    reason: str = ""
