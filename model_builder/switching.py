"""Switch a model to another version while it serves: load it beside the old one, route to it, unload the old one.

Seen on Triton 24.10: a load serves what was ready before until all versions of the new config are ready, and goes on
with it where one of them fails. Versions that both configs name are loaded again only where more than the version
policy has changed. A config given with the call stays in force until the folder's config.pbtxt changes.

So the new version is first loaded with a config given with the call: the folder still tells the old one, and a server
that starts anew comes up with it. Only a version whose canary row passes gets into config.pbtxt.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_builder.answers import Switched
from model_builder.listing import versions_of
from model_builder.pbtxt import edit
from model_builder.versions import examine, note_in_record, write_atomically
from serving.deadline import Deadline
from serving.errors import ConfigError, ServerError
from serving.models import ModelSpec, check_twin
from serving.pipeline import Pipeline
from serving.registry import read_model
from serving.settings import TritonSettings
from serving.triton_client import TritonClient, newest_first, parse_config

Progress = Callable[[str], None]
Pinned = Callable[[], Collection[str] | None]
# A model's instances share its requests: enough canaries at a time that each instance sees one.
CANARIES = 4
CANARY_TIMEOUT_MS = 20_000
LOOK_AGAIN_S = 0.5
LEAST_LOAD_S = 5.0


async def switch(
    repository: Path,
    name: str,
    version: str,
    *,
    triton_address: str,
    pinned: Pinned,
    timeout_s: float,
    progress: Progress = print,
    settle_s: float = 4.0,
) -> Switched:
    """Route a model to a version, and unload the others once nobody uses them.

    ``pinned`` returns the versions that open jobs have pinned, None where that cannot be known; it may block.
    ``settle_s``: how long a version must have had no request, longer than a door looks away from Triton.
    Raises ConfigError where the version cannot be served (then callers still get the one they had), DependencyDown
    where Triton does not answer. Whatever interrupts it: the same call again finishes it.
    """
    progress(f"{name}: looking at version {version}")
    with _locked(repository / name):
        looked = await asyncio.to_thread(examine, repository, name, version)
        address: dict[str, Any] = {"grpc_address": triton_address}
        async with TritonClient(TritonSettings(**address)) as client:
            run = _Switch(repository, looked.spec, looked.parameters, client, pinned, progress, settle_s, timeout_s)
            return await run.run()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        raise ConfigError(f"no model {folder.name} in {folder.parent}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(f"another switch of {folder.name} is at work: wait for it to end") from None
    finally:
        os.close(lock)


@dataclass
class _Switch:
    repository: Path
    spec: ModelSpec
    parameters: Mapping[str, str]
    client: TritonClient
    pinned: Pinned
    progress: Progress
    settle_s: float
    timeout_s: float
    _ends_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._ends_at = asyncio.get_running_loop().time() + self.timeout_s
        self.name, self.version = self.spec.name, self.spec.version
        # The twin goes first: the first model never has a version whose bulk lane is missing.
        self.names = tuple(dict.fromkeys((self.spec.bulk_model, self.name)))

    async def run(self) -> Switched:
        ready = await self._ready()
        there = versions_of(self.repository / self.name)
        old = newest_first({v for n in self.names for v in ready[n] if v != self.version and v in there})
        served = await self._served(ready[self.name], old)
        if old:
            self._hold(old, served)
        try:
            if any(self.version not in ready[name] for name in self.names):
                await self._bring_up(old, served)
            await self._check()
        except (ConfigError, ServerError):
            await self._put_back(old)
            raise
        await self._route(old)
        if not old:
            return Switched(self.name, self.version, old, retired=True)
        if reason := await self._until_unused(old):
            return Switched(self.name, self.version, old, retired=False, reason=reason)
        await self._retire()
        return Switched(self.name, self.version, old, retired=True)

    async def _ready(self) -> dict[str, tuple[str, ...]]:
        states = await self.client.models()
        return {name: states[name].versions if name in states else () for name in self.names}

    async def _served(self, ready: Sequence[str], old: Sequence[str]) -> str:
        """Return the version that the doors route to now, or would."""
        if ready:
            named = _parameter(await self.client.model_config(self.name, ready[0]), "serve_version")
            if named in ready:
                return named
        return old[0] if old else self.version

    def _hold(self, old: Sequence[str], served: str) -> None:
        """Let config.pbtxt name the old versions, where it says "the newest": the new one's folder is there already."""
        for name in self.names:
            text = self._text(name)
            if "specific" not in parse_config(text).get("version_policy", {}):
                self._write(name, self._edited(name, old, served))

    async def _bring_up(self, old: Sequence[str], served: str) -> None:
        self.progress(f"{self.name}: loading version {self.version}; {', '.join(old) or 'none'} serves meanwhile")
        for name in self.names:
            await self._load(name, parse_config(self._edited(name, [*old, self.version], served)))
        ready = await self._ready()
        missing = [name for name in self.names if self.version not in ready[name]]
        if missing:
            raise ConfigError(f"the model server did not load version {self.version} of {missing[0]}")

    async def _load(self, name: str, config: Mapping[str, Any] | None) -> None:
        """Load a model; once more where it fails, since the stack's supervisor may have been loading it too."""
        try:
            await self.client.load(name, config, self._left_s())
        except ConfigError as exc:
            if f"version {self.version} is at" in str(exc):
                raise
            await asyncio.sleep(LOOK_AGAIN_S)
            await self.client.load(name, config, self._left_s())

    def _left_s(self) -> float:
        return max(LEAST_LOAD_S, self._ends_at - asyncio.get_running_loop().time())

    async def _check(self) -> None:
        """Do what a door does with a version, and ask both lanes for its canary row."""
        config = await self.client.model_config(self.name, self.version)
        model = await asyncio.to_thread(read_model, self.repository / self.name, config, self.version)
        twin = model.spec.bulk_model
        if twin != self.name:
            check_twin(model.spec, await self.client.model_config(twin, self.version))
        pipeline = Pipeline(self.client)
        for lane in ("bulk", "interactive"):
            deadline = Deadline.after_ms(CANARY_TIMEOUT_MS)
            answers = (pipeline.canary_passes(model, lane, deadline) for _ in range(CANARIES))
            if not all(await asyncio.gather(*answers)):
                raise ConfigError(f"the canary row of {self.name} version {self.version} fails in the {lane} lane")
        self.progress(f"{self.name}: version {self.version} is ready in both lanes, its canary row passes")

    async def _put_back(self, old: Sequence[str]) -> None:
        """Leave nothing of the new version behind; the folder still tells the old one."""
        for name in self.names:
            try:
                if old and self.version in (await self._ready())[name]:
                    await self._load(name, parse_config(self._text(name)))
            except (ConfigError, ServerError) as exc:
                self.progress(f"{name}: version {self.version} stays loaded, unused: {exc}")

    async def _route(self, old: Sequence[str]) -> None:
        for name in self.names:
            text = self._edited(name, [*old, self.version], self.version)
            changed = self._write(name, text)
            loaded = await self.client.model_config(name, self.version)
            serves = name != self.name or _parameter(loaded, "serve_version") == self.version
            if changed or not serves:
                await self._load(name, None)
                loaded = await self.client.model_config(name, self.version)
            if name == self.name and _parameter(loaded, "serve_version") != self.version:
                await self._load(name, parse_config(text))
        self.progress(f"{self.name}: new work goes to version {self.version}")

    async def _until_unused(self, old: Sequence[str]) -> str:
        """Wait until no open job has pinned an old version and none has had a request for a while; returns why not."""
        told = ""
        while True:
            before = await self._requests(old)
            await asyncio.sleep(self.settle_s)
            pins = await asyncio.to_thread(self.pinned)
            busy = [version for version, count in (await self._requests(old)).items() if count != before.get(version)]
            kept = sorted(set(old) & set(pins or ()), key=int)
            if pins is None:
                reason = "whether open jobs still need it is not known: the gateway does not tell"
            elif kept:
                reason = f"open jobs have begun on version {', '.join(kept)}"
            elif busy:
                reason = f"version {', '.join(busy)} still gets requests"
            else:
                return ""
            if asyncio.get_running_loop().time() > self._ends_at:
                return reason
            if reason != told:
                self.progress(f"{self.name}: waiting: {reason}")
            told = reason

    async def _requests(self, old: Sequence[str]) -> dict[str, int]:
        counts = dict.fromkeys(old, 0)
        for name in self.names:
            seen = await self.client.requests_seen(name)
            counts = {version: count + seen.get(version, 0) for version, count in counts.items()}
        return counts

    async def _retire(self) -> None:
        for name in reversed(self.names):
            text = self._edited(name, [self.version], self.version)
            self._write(name, text)
            await self._load(name, None)
            if set((await self._ready())[name]) != {self.version}:
                await self._load(name, parse_config(text))

    def _text(self, name: str) -> str:
        return (self.repository / name / "config.pbtxt").read_text(encoding="utf-8")

    def _edited(self, name: str, versions: Sequence[str], served: str) -> str:
        parameters = {"serve_version": served, **self.parameters} if name == self.name else {}
        return edit(self._text(name), versions, parameters)

    def _write(self, name: str, text: str) -> bool:
        folder = self.repository / name
        changed = text != self._text(name)
        if changed:
            write_atomically(folder / "config.pbtxt", text)
        note_in_record(folder, "config.pbtxt", f"{self.version}/")
        return changed


def _parameter(config: Mapping[str, Any], key: str) -> str:
    return str(config.get("parameters", {}).get(key, {}).get("string_value", ""))
