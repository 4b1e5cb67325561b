"""Serves one of the two plain FastAPI applications with uvicorn: fastapi_server {app_async|app_threads}."""

import sys

import uvicorn

from benchmarks.peers.servers.common import Settings, end_with_parent

APPLICATIONS = ("app_async", "app_threads")


def main() -> None:
    """Serve until SIGTERM."""
    end_with_parent()
    settings = Settings.read()
    (name,) = sys.argv[1:]
    if name not in APPLICATIONS:
        raise SystemExit(f"expected one of {', '.join(APPLICATIONS)}")
    uvicorn.run(
        f"benchmarks.peers.servers.fastapi_app:{name}",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.processes,
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
