"""The stack that is measured: one of our own on free ports, or the one that runs already."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from local_stack.stack import Stack
from local_stack.state import StateFolder
from serving.errors import ConfigError
from serving.settings import KafkaSettings, ModelSettings, StackSettings, TritonSettings, load

START_TIMEOUT_S = 180.0
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a running stack. ``pids`` gives the roots of its process trees."""

    gateway: tuple[str, int]
    triton: str
    kafka: str
    topics: tuple[str, str]
    repository: Path
    pids: Callable[[], list[int]]
    description: str


@contextmanager
def own_stack() -> Iterator[Endpoints]:
    """Start a stack of our own in a fresh state folder on free ports; stop it at the end. Raises ConfigError.

    To be entered on the main thread: the stack ends with the thread that started it.
    """
    repository = load(ModelSettings).repository.absolute()
    kafka = load(KafkaSettings)
    with tempfile.TemporaryDirectory(prefix="twodoor-bench-") as folder:
        stack = Stack(
            Path(folder) / "home",
            repository=repository,
            # A start is not what is measured: on a busy machine it may take its time.
            environment={"TWODOOR_STACK_START_TIMEOUT_S": str(START_TIMEOUT_S)},
            start_timeout_s=START_TIMEOUT_S + 10,
        )
        with stack:
            yield endpoints(stack, repository, kafka)


def endpoints(stack: Stack, repository: Path, kafka: KafkaSettings) -> Endpoints:
    """Describe a stack that was started here."""
    return Endpoints(
        _host_port(stack.gateway_url),
        stack.triton_grpc,
        stack.kafka,
        (kafka.requests_topic, kafka.results_topic),
        repository,
        lambda: _pids(stack.home),
        "one of its own",
    )


def running_stack(url: str) -> Endpoints:
    """Describe the stack behind a gateway's URL; Triton's and Kafka's addresses come from the settings.

    Raises ConfigError for an address that is not this machine: the report puts load on nobody else.
    """
    kafka = load(KafkaSettings)
    home = load(StackSettings).home
    return Endpoints(
        _host_port(url),
        load(TritonSettings).grpc_address,
        kafka.bootstrap_servers,
        (kafka.requests_topic, kafka.results_topic),
        load(ModelSettings).repository.absolute(),
        lambda: _pids(home),
        f"the running one at {url}",
    )


def _host_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname not in LOOPBACK_NAMES:
        raise ConfigError(f"{url} is not http on loopback: the report puts load on this machine only")
    return parts.hostname, parts.port or 80


def _pids(home: Path) -> list[int]:
    """Read a stack's pids from its state folder; none where there is none."""
    record = StateFolder(home).read()
    if record is None:
        return []
    return [record.supervisor.pid, *(s.process.pid for s in record.services if s.process is not None)]
