"""One supervised service: start, wait until it answers, look after it, start it again when it ends, stop."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from local_stack.logs import tail, trim
from local_stack.process import identify, merged, wrapped
from local_stack.state import ServiceRecord, ServiceState, StateFolder
from serving.errors import ConfigError
from serving.settings import StackSettings

READY_POLL_S = 0.1
ALIVE_INTERVAL_S = 5.0
UNWELL_ANSWERS = 3
FIRST_PAUSE_S = 0.2
# After this long in good health a crash is a new one and not a part of the last series.
GOOD_HEALTH_S = 30.0
# A service that ends this often without ever having been ready will not get ready by trying again.
HOPELESS_EXITS = 3


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class Unhealthy(Exception):
    """Raised by whoever looks after a service when it has to be restarted; the message says why."""


def _nothing() -> None:
    """Do nothing."""


async def _nothing_to_care_for(pid: int) -> None:
    """Care for a service that needs no more than its health checked."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How one service is run.

    ``command``: built anew at each start, after ``prepare`` (blocking; may raise ConfigError). ``ready``: asked until
    it says yes. ``alive``: False = it says itself that it is not well; None = no answer. ``care``: runs beside the
    ready service with its pid. ``cleanup``: after its end. ``as_owner_of``: where we are root, the service runs as the
    owner of this folder. ``stop_signal``: asks it to end.
    """

    name: str
    address: str
    command: Callable[[], list[str]]
    ready: Callable[[], Awaitable[bool]]
    alive: Callable[[], Awaitable[bool | None]]
    environment: Mapping[str, str] = field(default_factory=dict)
    nice: int = 0
    prepare: Callable[[], None] = _nothing
    cleanup: Callable[[], None] = _nothing
    care: Callable[[int], Awaitable[None]] = _nothing_to_care_for
    as_owner_of: Path | None = None
    stop_signal: int = signal.SIGTERM


class Service:
    """Runs one Spec for as long as it is wanted; ``run`` is a task of the supervisor."""

    def __init__(
        self,
        spec: Spec,
        folder: StateFolder,
        settings: StackSettings,
        report: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.record = ServiceRecord(spec.name, spec.address)
        self.ready = asyncio.Event()
        self.hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Gets a sentence if the service cannot be brought up at all."""
        self._settings = settings
        self._log = folder.log_path(spec.name)
        self._report = report
        self._changed = changed
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._unwanted = asyncio.Event()
        self._again = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._grace_s = settings.stop_timeout_s
        self._was_ready = False

    async def run(self) -> None:
        """Run until cancelled, which kills what still runs."""
        pause_s, exits = FIRST_PAUSE_S, 0
        while True:
            await self._wanted.wait()
            self._idle.clear()
            started = time.monotonic()
            reason = await self._run_once()
            if reason is None:  # it was stopped on purpose, or is to be started again on purpose
                pause_s, exits = FIRST_PAUSE_S, 0
                continue
            exits += 1
            if not self._was_ready and exits >= HOPELESS_EXITS and not self.hopeless.done():
                self.hopeless.set_result(f"{reason}, {exits} times before it was ready{self._last_words()}")
            if self._was_ready and time.monotonic() - started > GOOD_HEALTH_S:
                pause_s = FIRST_PAUSE_S
            self._report(f"{self.spec.name} {reason}; starting it again in {pause_s:.1f} s (log: {self._log})")
            self.record.restarts += 1
            self._set("restarting")
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, self._settings.restart_backoff_max_s)

    async def stop(self, grace_s: float) -> None:
        """Ask the service to end and wait for it; after ``grace_s`` it is killed."""
        self._grace_s = grace_s
        self._wanted.clear()
        self._unwanted.set()
        await self._idle.wait()

    def start(self) -> None:
        """Want the service again after ``stop``."""
        self._unwanted.clear()
        self._wanted.set()

    async def restart(self, grace_s: float) -> None:
        """Stop and start; returns when it is on its way up."""
        await self.stop(grace_s)
        self.start()

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._unwanted.wait()
        except TimeoutError:
            return
        self._set("stopped")
        self._idle.set()

    async def _run_once(self) -> str | None:
        """Start the service and look after it until it ends; returns how it ended, None if it was asked to stop."""
        self._set("starting")
        try:
            await asyncio.to_thread(self.spec.prepare)
            process = await self._spawn()
        except (ConfigError, OSError, subprocess.SubprocessError) as exc:
            if not self._was_ready and not self.hopeless.done():
                self.hopeless.set_result(f"cannot start: {exc}")
            return f"cannot start: {exc}"
        ended = asyncio.create_task(process.wait(), name=f"{self.spec.name} exit")
        care = asyncio.create_task(self._look_after(process.pid), name=f"{self.spec.name} care")
        unwanted = asyncio.create_task(self._unwanted.wait(), name=f"{self.spec.name} stop")
        try:
            await asyncio.wait([ended, care, unwanted], return_when=asyncio.FIRST_COMPLETED)
            return self._verdict(process, care)
        finally:
            self.ready.clear()
            care.cancel()
            unwanted.cancel()
            await asyncio.gather(care, unwanted, return_exceptions=True)
            await self._end(process, ended)
            if self._unwanted.is_set():
                self._set("stopped")
                self._idle.set()

    def _verdict(self, process: asyncio.subprocess.Process, care: "asyncio.Task[None]") -> str | None:
        if self._unwanted.is_set():
            return None
        code = process.returncode
        if code is not None:
            return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        error = care.exception() if care.done() and not care.cancelled() else None
        if error is not None and not isinstance(error, Unhealthy):
            raise error
        return f"is not well: {error}"

    async def _spawn(self) -> asyncio.subprocess.Process:
        command = self.spec.command()
        trim(self._log, self._settings.log_max_bytes // 4)
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *wrapped(command, self.spec.nice, self.spec.as_owner_of),
                env=merged(self.spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                # A group of its own keeps the terminal's Ctrl-C away. A session of its own would change what a nice
                # value means: the kernel then compares it only inside that session.
                process_group=0,
            )
        finally:
            os.close(descriptor)
        self.record.command = command
        self.record.process = identify(process.pid)
        self._changed()
        return process

    async def _look_after(self, pid: int) -> None:
        """Wait until the service is ready, then watch it; raises Unhealthy."""
        started = time.monotonic()
        while not await self.spec.ready():
            if time.monotonic() - started > self._settings.start_timeout_s:
                raise Unhealthy(f"it was not ready within {self._settings.start_timeout_s:.0f} s")
            await asyncio.sleep(READY_POLL_S)
        self._was_ready = True
        self._set("ready")
        self.ready.set()
        self._report(f"{self.spec.name} ready at {self.spec.address} after {time.monotonic() - started:.1f} s")
        care = asyncio.ensure_future(self.spec.care(pid))
        try:
            await self._watch(care)
        finally:
            care.cancel()
            await asyncio.gather(care, return_exceptions=True)

    async def _watch(self, care: "asyncio.Future[None]") -> None:
        unwell, last_answer = 0, time.monotonic()
        while True:
            await (asyncio.sleep(ALIVE_INTERVAL_S) if care.done() else asyncio.wait([care], timeout=ALIVE_INTERVAL_S))
            if care.done():
                care.result()
            trim(self._log, self._settings.log_max_bytes)
            answer = await self.spec.alive()
            if answer is not None:
                last_answer = time.monotonic()
                unwell = 0 if answer else unwell + 1
            if unwell >= UNWELL_ANSWERS:
                raise Unhealthy("it says so itself")
            if time.monotonic() - last_answer > self._settings.silence_timeout_s:
                raise Unhealthy(f"no answer for {self._settings.silence_timeout_s:.0f} s")

    async def _end(self, process: asyncio.subprocess.Process, exit_task: "asyncio.Task[int]") -> None:
        """End the process and what is left of its group."""
        if process.returncode is None:
            self._set("stopping")
            process.send_signal(self.spec.stop_signal)
            done, _ = await asyncio.wait([exit_task], timeout=self._grace_s)
            if not done:
                self._report(f"{self.spec.name} did not end within {self._grace_s:.0f} s and is killed")
        if self.record.process:
            self.record.process.signal_group(signal.SIGKILL)
        await exit_task
        self.record.process = None
        self._changed()
        await asyncio.to_thread(self.spec.cleanup)

    def _last_words(self) -> str:
        last = tail(self._log)
        return f" (log: {self._log}; {last[0][:200]})" if last else ""

    def _set(self, state: ServiceState) -> None:
        self.record.state = state
        self._changed()
