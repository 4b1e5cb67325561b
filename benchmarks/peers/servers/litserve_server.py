"""LitServe: one API whose workers hold the model; batching by its own ``max_batch_size`` and ``batch_timeout``."""

import signal
from collections.abc import Sequence
from typing import Any

import litserve

from benchmarks.peers.servers.common import Model, Settings, end_with_parent


class OneByOne(litserve.LitAPI):
    """A call of ``predict`` has one text."""

    def setup(self, device: str) -> None:
        """Load the model (in each worker)."""
        self.model = Model(Settings.read())

    def decode_request(self, request: dict[str, Any]) -> str:
        """Take the text out of a body."""
        text: str = request["text"]
        return text

    def predict(self, x: str) -> dict[str, Any]:
        """Answer a text."""
        return self.model.answer([x])[0]

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        """Return the body of an answer."""
        return output


class Batched(OneByOne):
    """A call of ``predict`` has the texts of a batch, a list of answers comes back."""

    def batch(self, inputs: Sequence[str]) -> list[str]:
        """Keep the texts a list."""
        return list(inputs)

    def predict(self, x: list[str]) -> list[dict[str, Any]]:  # type: ignore[override]
        """Answer a batch."""
        return self.model.answer(x)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Give each caller its answer."""
        return output


def main() -> None:
    """Serve until SIGTERM."""
    end_with_parent()
    # LitServe stops its processes at Ctrl-C alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = Settings.read()
    api = Batched(settings.max_batch, settings.max_wait_s) if settings.batching else OneByOne()
    # fast_queue: the documentation's advice from a hundred requests a second on.
    server = litserve.LitServer(
        api, accelerator="cpu", devices=1, workers_per_device=settings.processes, fast_queue=True
    )
    server.run(
        host=settings.host, port=settings.port, num_api_servers=1, log_level="warning", generate_client_file=False,
        access_log=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
