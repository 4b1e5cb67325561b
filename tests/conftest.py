"""What all tests share: real parts that are started once and stopped in reverse. A part that is missing fails the test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog

from tests.parts import Gateway, Postgres, Triton, remove
from tests.stubs import write_repository

TritonFactory = Callable[[Path], Triton]
GatewayFactory = Callable[..., Gateway]
PostgresFactory = Callable[[], Postgres]


@pytest.fixture(scope="session", autouse=True)
def _plain_tracebacks() -> None:
    """Where nobody configures the logs, structlog draws a traceback with every local: seconds for one that is logged."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the developer's shell must not decide a test; where the tools are may stay."""
    kept = {"TWODOOR_SST2_DIR", "TWODOOR_STACK_TRITON_VENV", "TWODOOR_STACK_KAFKA_LIBS"}
    for name in [name for name in os.environ if name.startswith("TWODOOR_") and name not in kept]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A repository with the two default models, the stub ``stub_faulty``, and the twins of all."""
    folder = tmp_path_factory.mktemp("repository")
    write_repository(folder)
    yield folder
    remove(folder)


@pytest.fixture(scope="session")
def triton_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonFactory]:
    """Start a Triton of its own over a repository: for tests that end it, restart it or take models away."""
    with ExitStack() as stack:

        def start(repository: Path) -> Triton:
            made = Triton(tmp_path_factory.mktemp("triton"), repository)
            stack.callback(made.kill)
            return made.start()

        yield start


@pytest.fixture(scope="session")
def triton(triton_factory: TritonFactory, repository: Path) -> Triton:
    """The Triton that tests share; who ends it or kills a model's process uses ``triton_factory``."""
    return triton_factory(repository)


@pytest.fixture(scope="session")
def gateway_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayFactory]:
    """Make a gateway process (not started): ``gateway_factory(triton.grpc_address, repository, TWODOOR_…=…)``."""
    with ExitStack() as stack:

        def make(triton_address: str, repository: Path, **settings: object) -> Gateway:
            made = Gateway(tmp_path_factory.mktemp("gateway"), triton_address, repository, **settings)
            stack.callback(made.kill)
            return made

        yield make


@pytest.fixture(scope="session")
def gateway_process(gateway_factory: GatewayFactory, triton: Triton) -> Gateway:
    """The gateway that tests share, with default settings."""
    return gateway_factory(triton.grpc_address, triton.repository).start()


@pytest.fixture(scope="session")
def postgres_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresFactory]:
    """Start a PostgreSQL of one's own: for tests that end it, freeze it or restart it."""
    with ExitStack() as stack:

        def start() -> Postgres:
            made = Postgres(tmp_path_factory.mktemp("postgres"))
            stack.callback(made.kill)
            return made.start()

        yield start


@pytest.fixture(scope="session")
def postgres_server(postgres_factory: PostgresFactory) -> Postgres:
    """The PostgreSQL that tests share; who ends it or freezes it uses ``postgres_factory``."""
    return postgres_factory()


@pytest.fixture
def database_url(postgres_server: Postgres) -> Iterator[str]:
    """The URL of a database of the test's own, with the newest schema and nothing in it."""
    url = postgres_server.new_database()
    yield url
    postgres_server.drop_database(url)
