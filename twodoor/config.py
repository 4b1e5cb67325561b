"""Where the client and the commands find the doors: a few environment variables, read when they are asked for."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Addresses and names, the same variables and defaults as those of the parts themselves."""

    url: str
    bootstrap_servers: str
    requests_topic: str
    results_topic: str
    dlq_topic: str
    group_id: str
    max_message_bytes: int
    default_model: str
    repository: Path
    home: Path
    api_key: str | None = field(default=None, repr=False)
    triton_address: str = "127.0.0.1:8001"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read ``TWODOOR_*``; a variable that is empty counts as not set. Raises ValueError that names the variable."""
        given = os.environ if environ is None else environ

        def get(name: str, default: str) -> str:
            return given.get(f"TWODOOR_{name}") or default

        host = get("GATEWAY_HOST", "127.0.0.1")
        # An address that means "every interface" is one to bind, not one to call.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        shown_host = f"[{host}]" if ":" in host else host
        return cls(
            url=get("CLIENT_URL", f"http://{shown_host}:{get('GATEWAY_PORT', '8080')}"),
            bootstrap_servers=get("KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{get('STACK_KAFKA_PORT', '9092')}"),
            requests_topic=get("KAFKA_REQUESTS_TOPIC", "twodoor.requests"),
            results_topic=get("KAFKA_RESULTS_TOPIC", "twodoor.results"),
            dlq_topic=get("KAFKA_DLQ_TOPIC", "twodoor.requests.dlq"),
            group_id=get("CONSUMER_GROUP_ID", "twodoor"),
            max_message_bytes=_number("TWODOOR_KAFKA_MAX_MESSAGE_BYTES", get("KAFKA_MAX_MESSAGE_BYTES", str(2**20))),
            default_model=get("MODELS_DEFAULT", "sentiment_model"),
            repository=Path(get("MODELS_REPOSITORY", "model_repository")),
            home=Path(get("HOME", ".twodoor")),
            api_key=get("CLIENT_API_KEY", "") or None,
            triton_address=get("TRITON_GRPC_ADDRESS", f"127.0.0.1:{get('STACK_TRITON_GRPC_PORT', '8001')}"),
        )


def _number(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{name} is {value!r}, expected a whole number")
    return int(value)
