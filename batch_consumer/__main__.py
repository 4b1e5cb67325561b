"""The consumer process: settings, then run."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import structlog
import uvloop

from batch_consumer.app import AllSettings, run
from serving.errors import ConfigError
from serving.settings import (
    ConsumerSettings,
    JobsSettings,
    KafkaSettings,
    ModelSettings,
    TelemetrySettings,
    TritonSettings,
    load,
    unknown_variables,
)
from serving.startup import phase_done, process_age_s
from serving.telemetry import configure_logging, tracing


def main() -> int:
    """Run until told to stop; returns the exit code, 2 where a setting has to be changed."""
    imports_s = process_age_s()
    try:
        telemetry = load(TelemetrySettings)
        configure_logging(telemetry)
        log = structlog.get_logger("batch_consumer")
        phase_done("imports", imports_s)
        settings = AllSettings(
            load(ModelSettings), load(TritonSettings), load(KafkaSettings), load(ConsumerSettings), load(JobsSettings)
        )
        for name in unknown_variables():
            log.warning("unknown setting", variable=name)
        _give_way(settings.consumer.nice)
        with tracing(telemetry, "twodoor-consumer"):
            uvloop.run(run(settings))
    except ConfigError as error:
        sys.stderr.write(f"batch_consumer: {error}\n")
        return 2
    return 0


def _give_way(nice: int) -> None:
    """Raise every thread's niceness to ``nice``; it stays where whoever started us has already set it higher.

    Niceness is a thread's own on Linux: libraries have started some at import, and a thread inherits its starter's.
    """
    threads = [int(task.name) for task in Path("/proc/self/task").glob("*")] or [0]
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))


if __name__ == "__main__":
    sys.exit(main())
