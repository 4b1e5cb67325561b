"""Kafka's classes as an archive that the JVM maps, instead of loading and checking each: a start costs a third of the CPU.

Made once, beside the jars, from a broker that has just started. Without it everything works, only slower.
"""

import asyncio
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from local_stack import kafka
from local_stack.config import StackConfig
from local_stack.kafka.topics import answers
from local_stack.ports import free_ports
from serving.errors import ConfigError
from serving.settings import ConsumerSettings, GatewaySettings, KafkaSettings, ModelSettings, StackSettings, load

START_TIMEOUT_S = 90.0
DUMP_TIMEOUT_S = 90.0
_POLL_S = 0.2


def ensure_archive(libs: Path) -> str | None:
    """Make the archive of the jars in ``libs`` unless it is there; returns why it could not be made."""
    archive = kafka.archive_of(libs)
    if archive.exists():
        return None
    partial = archive.with_name(f"{archive.name}.partial")
    partial.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="twodoor-kafka-") as home:
        try:
            _dump(_config(Path(home), libs), partial)
        except (ConfigError, OSError, subprocess.SubprocessError) as exc:
            return str(exc)
    if not partial.exists():
        return "this Java makes none"
    partial.replace(archive)
    return None


def _config(home: Path, libs: Path) -> StackConfig:
    port, controller = free_ports(2)
    stack = load(StackSettings).model_copy(
        update={"home": home, "kafka_libs": libs, "kafka_port": port, "kafka_controller_port": controller}
    )
    doors = (load(KafkaSettings), load(GatewaySettings), load(ConsumerSettings), load(ModelSettings))
    return StackConfig(stack, *doors, services=("kafka",))


def _dump(config: StackConfig, archive: Path) -> None:
    """Start a broker, wait until it answers, and end it: the JVM writes the archive at its exit."""
    kafka.prepare(config)
    program, *arguments = kafka.command(config)
    command = [program, f"-XX:ArchiveClassesAtExit={archive}", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as broker:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not asyncio.run(answers(config.address("kafka"))):
                if broker.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError("the broker did not start")
                time.sleep(_POLL_S)
            broker.send_signal(signal.SIGTERM)
            broker.wait(DUMP_TIMEOUT_S)
        finally:
            broker.kill()
