"""``python -m gateway``: settings from the environment, then the server until SIGTERM.

Exit codes: 0 stopped by a signal, 2 something in the configuration has to change, 1 anything else.
"""

import gc
import signal
import sys

import structlog

from gateway.app import build
from gateway.filelimit import make_room
from gateway.keys import Keys
from gateway.server import DoorServer, bind, server_config
from serving.errors import ConfigError
from serving.settings import (
    GatewaySettings,
    JobsSettings,
    ModelSettings,
    TelemetrySettings,
    TritonSettings,
    load,
    unknown_variables,
)
from serving.startup import phase_done, process_age_s
from serving.telemetry import configure_logging, tracing

log = structlog.get_logger("gateway")


def main() -> int:
    """Run the door; returns the exit code."""
    imports_s = process_age_s()
    try:
        telemetry = load(TelemetrySettings)
        gateway, models, triton = load(GatewaySettings), load(ModelSettings), load(TritonSettings)
        jobs = load(JobsSettings)
        configure_logging(telemetry)
        with tracing(telemetry, "twodoor-gateway"):
            return _serve(gateway, models, triton, jobs, imports_s)
    except ConfigError as exc:
        print(f"gateway: {exc}", file=sys.stderr)  # noqa: T201 - one line for the operator, also before logs are set up
        return 2


def _serve(
    gateway: GatewaySettings, models: ModelSettings, triton: TritonSettings, jobs: JobsSettings, imports_s: float
) -> int:
    for name in unknown_variables():
        log.warning("unknown setting", variable=name)
    fatal: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        fatal.append(error)
        server.should_exit = True

    app = build(gateway, models, triton, on_fatal, keys=Keys(gateway.keys_file), jobs=jobs)
    server = DoorServer(server_config(app, gateway, make_room(gateway.max_connections)), app.state.stop_waiting)
    # uvicorn raises the signal again after a graceful stop; without a handler that would look like a crash.
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: None)
    if gateway.keys_file is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the app is open, and reads the keys again at this signal
    sock = bind(gateway)
    # What the imports left stays for good: a full collection that walked it would hold up every call for so long.
    gc.freeze()
    phase_done("imports", imports_s)
    log.info("starting", host=gateway.host, port=gateway.port)
    server.run([sock])
    if fatal and isinstance(fatal[0], ConfigError):
        raise fatal[0]
    if fatal:
        log.error("ended by a failure", exc_info=fatal[0])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
