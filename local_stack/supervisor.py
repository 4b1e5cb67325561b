"""The one supervising process: starts the services side by side, keeps them up, and stops them in order."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from local_stack import control, triton
from local_stack.ask import client, parts_down
from local_stack.config import StackConfig
from local_stack.ports import check_free
from local_stack.process import Identity, end, identify
from local_stack.service import Service
from local_stack.services import specs
from local_stack.state import Phase, StackRecord, StateFolder, stop_order
from serving.errors import ConfigError

ORPHAN_GRACE_S = 6.0
# Triton and Kafka end within this time; the doors, whose callers are waiting, get the rest.
PARTS_GRACE_S = 6.0
FIRST_STAGE = ("gateway", "consumer")
LOOK_AGAIN_S = 0.1


class Supervisor:
    """Owns the state folder and every service while ``run`` runs."""

    def __init__(self, config: StackConfig, report: Callable[[str], None]) -> None:
        self._config = config
        self._report = report
        self._folder = StateFolder(config.stack.home)
        self._services: dict[str, Service] = {}
        self._phase: Phase = "starting"
        self._end = asyncio.Event()
        self._hurry = asyncio.Event()
        self._me = identify_self()

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT; returns the exit code. Raises ConfigError if the stack cannot be started."""
        # aiokafka logs every refused connection; that a broker is not there yet is no news.
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        with self._folder.locked():
            remains = self._folder.read()
            left = remains.services if remains else []
            for service in left:
                service.state = "orphaned" if service.running else "stopped"
            # From here on `down` finds us; what was left stays on record until it is ended.
            self._folder.write(StackRecord(self._me, "starting", left))
            try:
                if remains:
                    await asyncio.to_thread(clear_remains, remains, self._config, self._report)
                self._config.check_paths()
                check_free(self._config.ports())
            except BaseException:
                self._set_phase("stopped")
                raise
            return await self._run_services()

    def _on_signal(self) -> None:
        if self._end.is_set():
            self._hurry.set()
        self._end.set()

    async def _run_services(self) -> int:
        async with client() as http:
            for spec in specs(self._config, http, self._report):
                self._services[spec.name] = Service(
                    spec, self._folder, self._config.stack, self._report, self._write_state
                )
            self._write_state()
            tasks = [asyncio.create_task(s.run(), name=n) for n, s in self._services.items()]
            try:
                async with control.serve(self._folder.socket, self._operate):
                    problem = await self._wait_until_up(tasks)
                    if problem:
                        self._report(problem)
                    elif not self._end.is_set():
                        self._set_phase("up")
                        self._report("up: " + ", ".join(f"{n} {s.spec.address}" for n, s in self._services.items()))
                        problem = await self._until_end(tasks)
                    await self._stop_all()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._set_phase("stopped")
            return 1 if problem else 0

    async def _wait_until_up(self, tasks: list[asyncio.Task[None]]) -> str | None:
        """Wait for all services; returns why the stack does not come up, None if it does or is asked to end."""
        ready = asyncio.create_task(self._all_ready())
        ended = asyncio.create_task(self._end.wait())
        hopeless = {s.hopeless: name for name, s in self._services.items()}
        try:
            waiting: list[asyncio.Future[Any]] = [ready, ended, *hopeless, *tasks]
            await asyncio.wait(
                waiting,
                timeout=self._config.stack.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
        for future, name in hopeless.items():
            if future.done():
                return f"{name} {future.result()}"
        if self._end.is_set() or all(s.ready.is_set() for s in self._services.values()):
            return None
        raise_first(tasks)
        late = [name for name, s in self._services.items() if not s.ready.is_set()]
        logs = ", ".join(str(self._folder.log_path(name)) for name in late)
        return f"{', '.join(late)} not ready after {self._config.stack.start_timeout_s:.0f} s: see {logs}"

    async def _all_ready(self) -> None:
        """Wait until each service is ready, and each door sees the parts that were started with it."""
        for service in self._services.values():
            await service.ready.wait()
        async with client() as http:
            for name, service in self._services.items():
                if name.split("-")[0] in FIRST_STAGE:
                    url = f"http://{service.spec.address}/readyz"
                    while await parts_down(http, url) & {"door", *self._services}:  # noqa: ASYNC110 (another process)
                        await asyncio.sleep(LOOK_AGAIN_S)

    async def _until_end(self, tasks: list[asyncio.Task[None]]) -> str | None:
        ended = asyncio.create_task(self._end.wait())
        waiting: list[asyncio.Future[Any]] = [ended, *tasks]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
        raise_first(tasks)
        return None

    async def _stop_all(self) -> None:
        """Stop the doors, then Triton and Kafka; what has not ended in its stage's time is killed.

        Inside a stage the signals go out in order and the waiting is shared, so that slow leavers do not add up.
        """
        started = time.monotonic()
        self._set_phase("stopping")
        self._report("stopping")
        ends_at = started + self._config.stack.stop_timeout_s
        doors = [s for n, s in self._services.items() if n.split("-")[0] in FIRST_STAGE]
        parts = [s for s in self._services.values() if s not in doors]
        for stage, reserve in ((doors, PARTS_GRACE_S), (parts, 0.0)):
            grace = max(1.0, ends_at - reserve - time.monotonic())
            in_order = sorted(stage, key=lambda s: stop_order(s.spec.name))
            stops = asyncio.gather(*(s.stop(grace) for s in in_order))
            hurry = asyncio.create_task(self._hurry.wait())
            waiting: list[asyncio.Future[Any]] = [stops, hurry]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not stops.done():
                self._report(f"killing {', '.join(service.spec.name for service in in_order)}")
                for service in in_order:
                    if service.record.process:
                        service.record.process.signal_group(signal.SIGKILL)
            hurry.cancel()
            await asyncio.gather(hurry, stops, return_exceptions=True)
        self._report(f"stopped after {time.monotonic() - started:.1f} s")

    async def _operate(self, operation: str, name: str) -> str | None:
        """Carry out what came through the control socket."""
        service = self._services.get(name)
        if service is None:
            return f"no such service: {name}; there are {', '.join(self._services)}"
        if self._end.is_set():
            return "the stack is stopping"
        grace = self._config.stack.stop_timeout_s
        if operation == "stop":
            await service.stop(grace)
        elif operation == "start":
            service.start()
        elif operation == "restart":
            await service.restart(grace)
        else:
            return f"no such operation: {operation}"
        return None

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._write_state()

    def _write_state(self) -> None:
        self._folder.write(StackRecord(self._me, self._phase, [s.record for s in self._services.values()]))


def identify_self() -> Identity:
    """Return the identity of this process."""
    me = identify(os.getpid())
    if me is None:
        raise ConfigError("/proc cannot be read: the local stack needs Linux")
    return me


def clear_remains(record: StackRecord, config: StackConfig, report: Callable[[str], None]) -> None:
    """End what a killed supervisor left running by its record, and say so. Blocks.

    Only processes that are, by pid, start time and command line, the ones that were recorded are touched.
    """
    left = [s for s in record.services if s.running]
    if left:
        names = ", ".join(f"{s.name} ({s.process.pid})" for s in left if s.process)
        end([s.process for s in left if s.process], ORPHAN_GRACE_S)
        report(f"ended what a killed stack had left running: {names}")
    elif record.phase != "stopped":
        report("the last stack was killed; nothing of it is left running")
    triton.clean_shared_memory(config)


def raise_first(tasks: list[asyncio.Task[None]]) -> None:
    """Raise the error of a task that ended with one: a service's loop never ends by itself."""
    for task in tasks:
        if task.done():
            task.result()
