"""Keeps Triton's models answering: this release neither restarts a model's dead process nor says that it is dead.

Seen on release 24.10: after the death of a stub the model stays "ready"; each request that meets the dead instance
fails after 1 s with "Stub process … is not healthy"; unloading never ends, yet loading again works beside it, within
two seconds and without harm to the other models. So that is what is done here, and the leftovers are ended.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from local_stack.ask import ASK_TIMEOUT_S, client, post_json
from local_stack.config import StackConfig
from local_stack.ports import LOOPBACK
from local_stack.process import Identity, children, command_line, identify
from local_stack.service import Unhealthy
from local_stack.triton.canary import Canary, Progress
from serving.models import version_file

WATCH_INTERVAL_S = 0.25
SETTLE_S = 0.3
CANARY_TIMEOUT_S = 10.0
# How long what was in flight at the living instances of a model may go on after the model was loaded again.
RETIRE_GRACE_S = 5.0
QUIET_AFTER_S = 30.0
DEAD = "is not healthy"
READY = "READY"
# A model is what its best version is.
STATES = {"UNAVAILABLE": 1, "UNLOADING": 2, "LOADING": 3, READY: 4}


class TritonApi:
    """The few questions we ask Triton over HTTP; every method raises httpx.HTTPError if it does not answer."""

    def __init__(self, http: httpx.AsyncClient, port: int) -> None:
        self._http = http
        self._base = f"http://{LOOPBACK}:{port}/v2"

    async def live(self) -> bool:
        """Whether the server answers at all."""
        return (await self._http.get(f"{self._base}/health/live")).status_code == httpx.codes.OK

    async def index(self) -> dict[str, tuple[str, str]]:
        """Return model → (state, reason) of every model Triton was asked to load: that of its best version."""
        found: dict[str, tuple[str, str]] = {}
        for entry in await self._entries():
            state = entry["state"], entry.get("reason", "")
            best = max(found.get(entry["name"], state), state, key=lambda one: STATES.get(one[0], 0))
            found[entry["name"]] = best
        return found

    async def ready_versions(self, model: str) -> tuple[str, ...]:
        """Return the versions of a model that are ready, newest first."""
        ready = {e["version"] for e in await self._entries() if e["name"] == model and e["state"] == READY}
        return tuple(sorted(ready, key=int, reverse=True))

    async def _entries(self) -> list[dict[str, str]]:
        _, entries = await post_json(self._http, f"{self._base}/repository/index", {}, ASK_TIMEOUT_S)
        return [entry for entry in entries or () if "state" in entry]

    async def get(self, model: str, what: str = "") -> Any:
        """Return metadata, ``/config`` or ``/stats`` of a model; None if it has none now."""
        answer = await self._http.get(f"{self._base}/models/{model}{what}")
        return answer.json() if answer.status_code == httpx.codes.OK else None

    async def infer(self, model: str, version: str, body: object, timeout_s: float) -> tuple[int, Any]:
        """Run one request."""
        return await post_json(self._http, f"{self._base}/models/{model}/versions/{version}/infer", body, timeout_s)

    async def load(self, model: str, timeout_s: float) -> str | None:
        """Load a model; returns why it did not load."""
        url = f"{self._base}/repository/models/{model}/load"
        status, answer = await post_json(self._http, url, {}, timeout_s)
        return None if status == httpx.codes.OK else str((answer or {}).get("error", f"status {status}"))

    async def reload(self, model: str, timeout_s: float) -> str | None:
        """Unload and load a model; returns why it did not load."""
        await post_json(self._http, f"{self._base}/repository/models/{model}/unload", {}, ASK_TIMEOUT_S)
        return await self.load(model, timeout_s)


class ModelKeeper:
    """Watches every loaded model of one Triton process."""

    def __init__(self, config: StackConfig, report: Callable[[str], None]) -> None:
        self._config = config
        self._report = report

    async def run(self, triton_pid: int) -> None:
        """Run until cancelled; raises Unhealthy when only a restart of Triton can help."""
        failure: Unhealthy | None = None
        try:
            async with client() as http, asyncio.TaskGroup() as group:
                api = TritonApi(http, self._config.stack.triton_http_port)
                watched: set[str] = set()
                while True:
                    for name in await self._ready_models(api) - watched:
                        watched.add(name)
                        watch = ModelWatch(name, triton_pid, api, self._config, self._report, group)
                        group.create_task(watch.run(), name=f"watch {name}")
                    await asyncio.sleep(self._config.stack.canary_interval_s)
        except* Unhealthy as errors:
            failure = next(e for e in errors.exceptions if isinstance(e, Unhealthy))
        if failure:
            raise failure

    @staticmethod
    async def _ready_models(api: TritonApi) -> set[str]:
        try:
            return {name for name, (state, _) in (await api.index()).items() if state == READY}
        except httpx.HTTPError:
            return set()  # whether Triton is alive is asked elsewhere


class ModelWatch:
    """Watches one model: its processes four times a second, its canary row where nothing else shows it works."""

    def __init__(
        self,
        name: str,
        triton_pid: int,
        api: TritonApi,
        config: StackConfig,
        report: Callable[[str], None],
        group: asyncio.TaskGroup,
    ) -> None:
        self.name = name
        self._triton_pid = triton_pid
        self._api = api
        self._stack = config.stack
        self._timeout_s = min(CANARY_TIMEOUT_S, config.stack.silence_timeout_s)
        self._folder = config.repository / name
        self._report = report
        self._group = group
        self._versions: tuple[str, ...] = ()
        self._asked = ""
        self._stubs: list[Identity] = []
        self._retired: set[Identity] = set()
        self._pause_s = 0.0
        self._revived_at = 0.0
        self._canary: Canary | None = None
        self._differs = False

    async def run(self) -> None:
        """Run until cancelled; raises Unhealthy when the model cannot be loaded again."""
        while True:
            try:
                if reason := await self._learn() or await self._until_trouble():
                    await self._revive(reason)
            except httpx.HTTPError:
                await asyncio.sleep(self._stack.canary_interval_s)  # Triton is busy or away: not this model's trouble

    async def _learn(self) -> str | None:
        """Wait until the model is ready and see which processes run it; returns what is wrong with it already."""
        while not (versions := await self._api.ready_versions(self.name)):  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(WATCH_INTERVAL_S)
        self._versions = versions
        self._stubs = self._find_stubs()
        # Only the version that serves is asked: one that is to be unloaded must be seen to have no more requests.
        config = await self._api.get(self.name, "/config") or {}
        named = config.get("parameters", {}).get("serve_version", {}).get("string_value")
        self._asked = named if named in versions else versions[0]
        self._canary = Canary.read(version_file(self._folder, self._asked, "canary.json"))
        if self._stubs and await self._lacks_stubs(versions):
            return await self._confirm_death()
        return None

    async def _lacks_stubs(self, versions: Iterable[str]) -> bool:
        """Whether one of the versions has fewer processes than instances."""
        config = await self._api.get(self.name, "/config") or {}
        groups = config.get("instance_group", [])
        expected = sum(int(g.get("count", 1)) * max(1, len(g.get("gpus", []))) for g in groups)
        return any(len(self._find_stubs(version)) < expected for version in versions)

    async def _until_trouble(self) -> str | None:
        """Watch until the model is dead (returns the reason), or was unloaded or replaced by somebody (None)."""
        # Side by side: a canary may wait long behind bulk work, and a death should be seen at once.
        watches = [asyncio.create_task(self._until_process_gone()), asyncio.create_task(self._until_no_answer())]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _until_process_gone(self) -> str | None:
        while all(stub.alive for stub in self._stubs):  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(WATCH_INTERVAL_S)
        return await self._confirm_death()

    async def _until_no_answer(self) -> str | None:
        progress = Progress(self._stack.silence_timeout_s)
        while True:
            await asyncio.sleep(self._stack.canary_interval_s)
            if await self._api.ready_versions(self.name) != self._versions:
                return None  # another set of versions was loaded: all is learned anew
            if reason := await self._ask(progress):
                return reason

    async def _confirm_death(self) -> str | None:
        """Tell a death from an unload and from a reload by somebody else, which also end processes."""
        await asyncio.sleep(SETTLE_S)
        versions = await self._api.ready_versions(self.name)
        return "its process died" if versions and await self._lacks_stubs(versions) else None

    async def _ask(self, progress: Progress) -> str | None:
        """Run the canary row if the model did nothing since the last look; returns why it counts as dead."""
        if progress.moved(await self._executions()) or self._canary is None:
            return None
        try:
            metadata = await self._api.get(self.name)
            if metadata is None:
                return None
            row = self._canary.request(metadata)
            status, answer = await self._api.infer(self.name, self._asked, row, self._timeout_s)
        except httpx.TimeoutException:
            # Saturated is not dead, as long as it gets anything done.
            silent = not progress.moved(await self._executions()) and progress.silent
            return f"it answered nothing for {self._stack.silence_timeout_s:.0f} s" if silent else None
        if status == httpx.codes.OK:
            progress.alive()
            if not self._differs and self._canary.differs(answer):
                self._differs = True  # said once: loading the same file again would not change it
                self._report(f"{self.name}: its canary row has another result than when the model was built")
        elif DEAD in str(answer):
            return "its process does not answer"
        elif status >= httpx.codes.INTERNAL_SERVER_ERROR and progress.silent:
            return f"its canary row has failed for {self._stack.silence_timeout_s:.0f} s"
        return None

    async def _revive(self, reason: str) -> None:
        now = time.monotonic()
        quiet = now - self._revived_at > QUIET_AFTER_S
        self._pause_s = 0.0 if quiet else min(max(0.2, 2 * self._pause_s), self._stack.restart_backoff_max_s)
        self._report(f"{self.name}: {reason}; loading it again")
        await asyncio.sleep(self._pause_s)
        old = self._find_stubs()
        self._retired.update(old)
        try:
            problem = await self._api.reload(self.name, self._stack.start_timeout_s)
        except httpx.TimeoutException as exc:
            raise Unhealthy(f"cannot load {self.name} again") from exc
        self._revived_at = time.monotonic()
        if old:
            self._group.create_task(self._end_later(old))
        if problem:
            self._report(f"{self.name}: does not load: {first_line(problem)}")
        else:
            self._report(f"{self.name}: ready again after {self._revived_at - now:.1f} s")

    async def _end_later(self, stubs: Iterable[Identity]) -> None:
        """End the old instances, which Triton would keep for ever, once their last requests had time to finish."""
        await asyncio.sleep(RETIRE_GRACE_S)
        for stub in stubs:
            stub.signal(signal.SIGKILL)

    async def _executions(self) -> int:
        stats = await self._api.get(self.name, "/stats") or {}
        return sum(int(s["execution_count"]) for s in stats.get("model_stats", []))

    def _find_stubs(self, version: str = "") -> list[Identity]:
        """Return this model's (or a version's) living stub processes; a stub's first argument is the model's file."""
        marker = f"{self._folder}/{version}/" if version else f"{self._folder}/"
        found = (identify(pid) for pid in children(self._triton_pid) if marker in "".join(command_line(pid)[1:2]))
        return [stub for stub in found if stub and stub not in self._retired]


def first_line(text: str) -> str:
    """Return the first line of an error."""
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
