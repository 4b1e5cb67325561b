"""A gateway of one's own beside a running Triton: for what needs other settings, or is to be seen from its start."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.callers import HttpConnection, get
from benchmarks.processes import end
from benchmarks.stack import START_TIMEOUT_S, Endpoints
from serving.errors import ConfigError

LOOPBACK = "127.0.0.1"
ASK_S = 0.05
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class OwnGateway:
    """A running gateway process."""

    address: tuple[str, int]
    pid: int

    @property
    def memory_bytes(self) -> int:
        """What the process holds in memory."""
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def peak_memory_bytes(self) -> int:
        """The most the process ever held in memory."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found.group(1)) * 1024

    @property
    def open_files(self) -> int:
        """How many files, sockets among them, the process has open."""
        return psutil.Process(self.pid).num_fds()


@asynccontextmanager
async def own_gateway(stack: Endpoints, settings: Mapping[str, object]) -> AsyncIterator[OwnGateway]:
    """Start a gateway with these variables over the stack's Triton; stop it at the end. Raises ConfigError."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        address = (LOOPBACK, probe.getsockname()[1])
    own = {
        "TWODOOR_GATEWAY_HOST": LOOPBACK,
        "TWODOOR_GATEWAY_PORT": str(address[1]),
        "TWODOOR_TRITON_GRPC_ADDRESS": stack.triton,
        "TWODOOR_MODELS_REPOSITORY": str(stack.repository),
        **{name: str(value) for name, value in settings.items()},
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TWODOOR_GATEWAY_")}
    with tempfile.TemporaryDirectory(prefix="twodoor-bench-") as folder:
        log = Path(folder) / "gateway.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "gateway"]
            # In this process's session and not its group: the kernel shares cores out by session.
            process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds, and nothing else runs here meanwhile
                command, env={**inherited, **own}, stdout=output, stderr=output, process_group=0
            )
        try:
            await _ready(address, process, log)
            yield OwnGateway(address, process.pid)
        finally:
            await asyncio.to_thread(end, process, STOP_S)


async def _ready(address: tuple[str, int], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the gateway sees Triton."""
    end_s = time.monotonic() + START_TIMEOUT_S
    connection = HttpConnection(*address)
    request = get("/readyz", f"{address[0]}:{address[1]}")
    try:
        while True:
            try:
                if b'"triton":"up"' in (await connection.send(request))[1]:
                    return
            except OSError:
                pass  # it does not listen yet
            if process.poll() is not None or time.monotonic() > end_s:
                said = await asyncio.to_thread(log.read_text, errors="replace")
                raise ConfigError(f"a gateway for the benchmark did not start: {said[-2000:]}")
            await asyncio.sleep(ASK_S)
    finally:
        await connection.close()
