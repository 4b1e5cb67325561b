"""What integration tests share beyond Triton and the gateway: one real Kafka, and consumers over it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from local_stack.stack import Stack
from tests.integration.consumer_parts import Consumer, Topics
from tests.parts import Triton

ConsumerFactory = Callable[..., Consumer]


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bootstrap address of the Kafka that tests share; who restarts it starts one of its own."""
    with Stack(tmp_path_factory.mktemp("kafka"), services=("kafka",)) as stack:
        yield stack.kafka


@pytest.fixture
def consumer_factory(kafka: str, triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsumerFactory]:
    """Make a consumer process (not started) over the shared parts: ``consumer_factory(topics, TWODOOR_…=…)``."""
    with ExitStack() as stack:

        def make(topics: Topics, **settings: object) -> Consumer:
            address = settings.pop("triton", triton.grpc_address)
            where = settings.pop("kafka", kafka)
            folder = tmp_path_factory.mktemp("consumer")
            made = Consumer(folder, str(where), str(address), triton.repository, topics, **settings)
            stack.callback(made.kill)
            return made

        yield make
