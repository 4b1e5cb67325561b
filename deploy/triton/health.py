"""Health check of the CPU tier's Triton container: the server is ready and each model answers its canary row.

Triton 24.10 goes on saying "ready" after the process of a Python-based model died, and does not start it again. A
container has no supervisor, so this check ends the server then (process 1) and the restart policy brings it back.
It needs only the standard library.
"""

import http.client
import json
import os
import signal
import sys
from pathlib import Path

TIMEOUT_S = 5.0
SERVER_PROCESS = 1


def main(repository: str, address: str) -> int:
    """Return 0 when the server is ready and no model's process is dead."""
    status, _ = ask(address, "GET", "/v2/health/ready")
    if status != 200:
        sys.stdout.write(f"not ready: {status}\n")
        return 1
    dead = [folder.name for folder in sorted(Path(repository).iterdir()) if is_dead(address, folder)]
    if dead:
        sys.stdout.write(f"the process of {', '.join(dead)} is dead: ending the server\n")
        os.kill(SERVER_PROCESS, signal.SIGTERM)
        return 1
    return 0


def is_dead(address: str, folder: Path) -> bool:
    """Return whether Triton says that the model's process is gone; a busy or unloaded model is not dead."""
    file = folder / "canary.json"
    if not file.is_file():
        return False
    inputs = json.loads(file.read_bytes())["inputs"]
    tensors = [{"name": name, "datatype": "INT64", "shape": [1, len(ids)], "data": ids} for name, ids in inputs.items()]
    status, body = ask(address, "POST", f"/v2/models/{folder.name}/infer", {"inputs": tensors})
    return status >= 500 and b"stub process" in body.lower()


def ask(address: str, method: str, path: str, body: "dict[str, object] | None" = None) -> "tuple[int, bytes]":
    """Return status and body of one call; status 0 when there was no answer."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, json.dumps(body) if body else None)
        response = connection.getresponse()
        return response.status, response.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
