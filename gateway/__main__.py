"""``python -m gateway``: settings from the environment, then the server until SIGTERM.

Exit codes: 0 stopped by a signal, 2 something in the configuration has to change, 1 anything else.
"""

import signal
import sys

import structlog
from uvicorn import Server

from gateway.app import build
from gateway.server import bind, server_config
from serving.errors import ConfigError
from serving.settings import GatewaySettings, ModelSettings, TelemetrySettings, TritonSettings, load, unknown_variables
from serving.telemetry import configure_logging, tracing

log = structlog.get_logger("gateway")


def main() -> int:
    """Run the door; returns the exit code."""
    try:
        telemetry = load(TelemetrySettings)
        gateway, models, triton = load(GatewaySettings), load(ModelSettings), load(TritonSettings)
        configure_logging(telemetry)
        with tracing(telemetry, "twodoor-gateway"):
            return _serve(gateway, models, triton)
    except ConfigError as exc:
        print(f"gateway: {exc}", file=sys.stderr)  # noqa: T201 - one line for the operator, also before logs are set up
        return 2


def _serve(gateway: GatewaySettings, models: ModelSettings, triton: TritonSettings) -> int:
    for name in unknown_variables():
        log.warning("unknown setting", variable=name)
    fatal: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        fatal.append(error)
        server.should_exit = True

    server = Server(server_config(build(gateway, models, triton, on_fatal), gateway))
    # uvicorn raises the signal again after a graceful stop; without a handler that would look like a crash.
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: None)
    sock = bind(gateway)
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
