"""Which Triton the contract suite runs against: the local one, or any other with TWODOOR_TEST_TRITON=host:port.

The other one must serve the built default models; the suite is the same for every backend.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from serving.pipeline import Pipeline
from serving.registry import Registry
from serving.settings import ModelSettings, TritonSettings
from serving.triton_client import TritonClient
from tests.parts import ROOT, Triton

REPORT = pytest.StashKey[str]()


@dataclass(frozen=True, slots=True)
class Served:
    """A Triton under contract: its client, the models it serves and the pipeline over them."""

    client: TritonClient
    registry: Registry
    pipeline: Pipeline


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """Return address and repository folder of the Triton under contract."""
    other = os.environ.get("TWODOOR_TEST_TRITON")
    if other:
        yield other, ROOT / "model_repository"
        return
    triton: Triton = request.getfixturevalue("triton")
    yield triton.grpc_address, triton.repository


@pytest_asyncio.fixture
async def served(target: tuple[str, Path], pytestconfig: pytest.Config) -> AsyncIterator[Served]:
    """Connect to the Triton under contract and read its models; notes its backend for the report."""
    address, repository = target
    settings = TritonSettings(grpc_address=address)
    async with TritonClient(settings) as client:
        registry = Registry(client, ModelSettings(repository=repository), settings)
        async with asyncio.timeout(60):
            await registry.refresh()
            version = await client.server_version()
            config = await client.model_config("sentiment_model", "")
        kind = config["instance_group"][0]["kind"]
        runtime = config.get("runtime") or "native"
        pytestconfig.stash[REPORT] = f"Triton {version}, backend {config['backend']} ({runtime}), {kind}"
        yield Served(client, registry, Pipeline(client))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the backend: the same suite says something else of each."""
    if REPORT in config.stash:
        terminalreporter.write_line(f"contract suite ran against: {config.stash[REPORT]}")
