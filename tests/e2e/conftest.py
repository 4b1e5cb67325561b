"""One whole stack for the end-to-end tests, and plain Kafka clients that share no code with ours."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_stack.stack import Stack
from tests.parts import ROOT, remove
from tests.stubs import write_repository


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whole-stack tests the time that restarts of real servers take."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Postgres, Triton, Kafka, gateway and consumer as `twodoor up` starts them, over the default models and the stub."""
    home = tmp_path_factory.mktemp("stack")
    repository = write_repository(home / "repository")
    with Stack(home / "home", repository=repository) as running:
        yield running
    remove(repository)


@pytest.fixture(scope="session")
def sst2() -> list[tuple[str, str]]:
    """SST-2's 1,821 test sentences with their labels; where they are missing the test says so in one line."""
    folder = Path(os.environ.get("TWODOOR_SST2_DIR", "../shared/data/sst2"))
    file = folder if folder.is_absolute() else ROOT / folder
    if not (file / "test.tsv").is_file():
        # The make target names what was not run; continuous integration refuses to start without the data.
        pytest.skip("not run: SST-2")
    lines = (file / "test.tsv").read_text(encoding="utf-8").split("\n")
    pairs = [line.rsplit("\t", 1) for line in lines if line]
    return [(text, {"0": "negative", "1": "positive"}[label]) for text, label in pairs]
