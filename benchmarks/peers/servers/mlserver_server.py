"""Writes MLServer's two settings files and serves them, as ``mlserver start`` does."""

import json
import os
import sys
from pathlib import Path

from benchmarks.peers.servers.common import Settings, end_with_parent


def main() -> None:
    """Become ``mlserver start``; it serves until SIGTERM."""
    end_with_parent()
    settings = Settings.read()
    folder = Path(settings.home) / "models"
    folder.mkdir()
    server = {
        "debug": False, "host": settings.host, "http_port": settings.port, "grpc_port": settings.second_port,
        "metrics_endpoint": None, "parallel_workers": settings.processes,
    }  # fmt: skip
    model = {"name": "sentiment", "implementation": "benchmarks.peers.servers.mlserver_model.Sentiment"}
    batching = {"max_batch_size": settings.max_batch, "max_batch_time": settings.max_wait_s}
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(json.dumps({**model, **(batching if settings.batching else {})}))
    command = [str(Path(sys.executable).parent / "mlserver"), "start", str(folder)]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
