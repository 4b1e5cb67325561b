"""What one local stack is: its settings, which services it runs, and the addresses others need to reach it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from local_stack import postgres
from local_stack.ports import LOOPBACK, PortUse
from local_stack.state import ORDER
from serving.errors import ConfigError
from serving.settings import (
    ConsumerSettings,
    GatewaySettings,
    KafkaSettings,
    ModelSettings,
    StackSettings,
    load,
)

# Triton starts each model's process by a line for bash in which it quotes no path.
_SHELL = re.compile(r"""[\s|&;<>()$`"'\\]""")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Settings of every part the local stack starts.

    ``services`` is a part of ORDER; ``extra`` is laid over the environment of the doors.
    """

    stack: StackSettings
    kafka: KafkaSettings
    gateway: GatewaySettings
    consumer: ConsumerSettings
    models: ModelSettings
    services: tuple[str, ...] = ORDER
    consumers: int = 1
    extra: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, services: tuple[str, ...] = ORDER, consumers: int | None = None) -> Self:
        """Read all settings from the environment; raises ConfigError."""
        unknown = sorted(set(services) - set(ORDER))
        if unknown or not services:
            raise ConfigError(f"no such service: {', '.join(unknown) or '(none named)'}; there are {', '.join(ORDER)}")
        stack = load(StackSettings)
        count = stack.consumers if consumers is None else consumers
        if not 0 <= count <= 16:
            raise ConfigError(f"--consumers must be 0 to 16, not {count}")
        if own_database(stack):
            services = tuple(name for name in services if name != "postgres")
        return cls(
            stack, load(KafkaSettings), load(GatewaySettings), load(ConsumerSettings), load(ModelSettings),
            tuple(name for name in ORDER if name in services), count,
        )  # fmt: skip

    @property
    def repository(self) -> Path:
        """Absolute path of the model repository."""
        return self.models.repository.absolute()

    @property
    def objects(self) -> Path:
        """Absolute path of the folder with the inputs and results of jobs."""
        return self.stack.home.absolute() / "objects"

    def check_paths(self) -> None:
        """Raise ConfigError for a path that a part cannot bear and would hang on."""
        home = self.stack.home.absolute()
        if "triton" in self.services:
            for path, setting in ((home, "TWODOOR_HOME"), (self.repository, "TWODOOR_MODELS_REPOSITORY")):
                if found := _SHELL.search(str(path)):
                    raise ConfigError(
                        f"Triton cannot start a model from a path with {found[0]!r} in it: "
                        f"{path} (set {setting} to another folder)"
                    )
        if "kafka" in self.services and "," in str(home):
            raise ConfigError(f"Kafka takes a comma for the end of a path: {home} (set TWODOOR_HOME to another folder)")

    @property
    def names(self) -> list[str]:
        """Names of the services as `status` shows them, in the order they start."""
        doors = [consumer_name(i) for i in range(self.consumers)] if "consumer" in self.services else []
        return [name for name in self.services if name != "consumer"] + doors

    def address(self, name: str) -> str:
        """Return host:port of a service's main endpoint."""
        ports = {
            "postgres": self.stack.postgres_port,
            "kafka": self.stack.kafka_port,
            "triton": self.stack.triton_grpc_port,
            "gateway": self.gateway.port,
        }
        return f"{LOOPBACK}:{ports[name] if name in ports else self.consumer.port + consumer_index(name)}"

    def ports(self) -> list[PortUse]:
        """Return every port the configured services will listen on."""
        stack = self.stack
        uses = {
            "postgres": [PortUse(stack.postgres_port, "TWODOOR_STACK_POSTGRES_PORT")],
            "kafka": [
                PortUse(stack.kafka_port, "TWODOOR_STACK_KAFKA_PORT"),
                PortUse(stack.kafka_controller_port, "TWODOOR_STACK_KAFKA_CONTROLLER_PORT"),
            ],
            "triton": [
                PortUse(stack.triton_http_port, "TWODOOR_STACK_TRITON_HTTP_PORT"),
                PortUse(stack.triton_grpc_port, "TWODOOR_STACK_TRITON_GRPC_PORT"),
                PortUse(stack.triton_metrics_port, "TWODOOR_STACK_TRITON_METRICS_PORT"),
            ],
            "gateway": [PortUse(self.gateway.port, "TWODOOR_GATEWAY_PORT")],
            "consumer": [
                PortUse(self.consumer.port + i, f"TWODOOR_CONSUMER_PORT{f' (consumer-{i + 1})' if i else ''}")
                for i in range(self.consumers)
            ],
        }
        return [use for name in self.services for use in uses[name]]


def consumer_name(index: int) -> str:
    """Return ``consumer``, ``consumer-2``, …"""
    return "consumer" if index == 0 else f"consumer-{index + 1}"


def consumer_index(name: str) -> int:
    """Return which consumer a name means, from 0."""
    return 0 if name == "consumer" else int(name.split("-")[1]) - 1


def stack_environment(config: StackConfig) -> dict[str, str]:
    """Return the ``TWODOOR_*`` variables with which doors, commands and tests find this stack."""
    stack = config.stack
    return {
        "TWODOOR_HOME": str(stack.home.absolute()),
        "TWODOOR_MODELS_REPOSITORY": str(config.repository),
        "TWODOOR_TRITON_GRPC_ADDRESS": config.address("triton"),
        "TWODOOR_KAFKA_BOOTSTRAP_SERVERS": config.address("kafka"),
        "TWODOOR_GATEWAY_PORT": str(config.gateway.port),
        "TWODOOR_CONSUMER_PORT": str(config.consumer.port),
        "TWODOOR_CLIENT_URL": f"http://{config.address('gateway')}",
        "TWODOOR_STACK_TRITON_HTTP_PORT": str(stack.triton_http_port),
        "TWODOOR_STACK_TRITON_GRPC_PORT": str(stack.triton_grpc_port),
        "TWODOOR_STACK_TRITON_METRICS_PORT": str(stack.triton_metrics_port),
        "TWODOOR_STACK_KAFKA_PORT": str(stack.kafka_port),
        "TWODOOR_STACK_KAFKA_CONTROLLER_PORT": str(stack.kafka_controller_port),
        "TWODOOR_STACK_POSTGRES_PORT": str(stack.postgres_port),
        **jobs_environment(config),
    }


def jobs_environment(config: StackConfig) -> dict[str, str]:
    """Return where this stack keeps jobs; nothing where they are kept elsewhere (the variables are set) or not at all.

    Holds the password of the database: for the environment of a process, never for a command line or a log.
    """
    found = {"TWODOOR_JOBS_DATABASE_URL": postgres.url(config.stack)} if "postgres" in config.services else {}
    if (found or own_database(config.stack)) and not os.environ.get("TWODOOR_JOBS_OBJECTS_URL"):
        found["TWODOOR_JOBS_OBJECTS_URL"] = config.objects.as_uri()
    return found


def own_database(stack: StackSettings) -> bool:
    """Whether the environment names a database of the user's own, so that none has to be started."""
    chosen = os.environ.get("TWODOOR_JOBS_DATABASE_URL", "")
    made = postgres.password_file(stack).exists()
    return bool(chosen) and not (made and chosen == postgres.url(stack))
