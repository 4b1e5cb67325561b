"""Serves the BentoML service, as ``bentoml serve`` does."""

import os
import sys
from pathlib import Path

from benchmarks.peers.servers.common import Settings, end_with_parent


def main() -> None:
    """Become ``bentoml serve``; it serves until SIGTERM."""
    end_with_parent()
    settings = Settings.read()
    service = "Batched" if settings.batching else "OneByOne"
    command = [
        str(Path(sys.executable).parent / "bentoml"), "serve", f"benchmarks.peers.servers.bentoml_service:{service}",
        "--host", settings.host, "--port", str(settings.port),
    ]  # fmt: skip
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
