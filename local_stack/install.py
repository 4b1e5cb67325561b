"""Fetch what pip cannot: Kafka's jars, by Maven and checked; and see that the machine has the rest.

A part that is missing gives one line that says what to type; where we are root on Debian or Ubuntu it is installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from local_stack import kafka, postgres
from local_stack.api import say
from local_stack.kafka.archive import ensure_archive
from local_stack.triton import Installation
from serving.errors import ConfigError
from serving.settings import StackSettings, load

PYTHONS = ((3, 11), (3, 13))
# The last version of the plugin that Debian's Maven also knows by heart; newer ones copy no differently.
COPY = "org.apache.maven.plugins:maven-dependency-plugin:2.8:copy-dependencies"
MAVEN_TIMEOUT_S = 600.0
APT_TIMEOUT_S = 600.0
B64_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


def install() -> int:
    """Bring this machine to where `up` works; a second run takes no time. Returns an exit code."""
    try:
        check_platform()
        settings = load(StackSettings)
        ensure_kafka(settings.kafka_libs.absolute())
        kafka.java()
        if problem := ensure_archive(settings.kafka_libs.absolute()):
            say(f"local stack: Kafka will start more slowly, without an archive of its classes: {problem}")
        postgres.program("postgres")
        ensure_libpython(settings.triton_venv)
    except ConfigError as exc:
        say(f"local stack: {exc}")
        return 1
    ensure_b64()
    say("local stack: everything it needs is there")
    return 0


def check_platform() -> None:
    """Raise ConfigError where the local stack cannot run."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ConfigError(
            f"needs Linux on x86-64, this is {platform.system()} on {platform.machine()}: use compose.yaml instead"
        )
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise ConfigError(f"needs Python 3.11 to 3.13, this is {platform.python_version()}")


def ensure_kafka(libs: Path) -> None:
    """Copy Kafka's jars to ``libs`` unless they are all there; raises ConfigError.

    They are fetched into a folder beside it and moved when complete and checked, so a fetch that was interrupted
    is done again and never taken for a whole one. Maven keeps what it has fetched.
    """
    wanted = checksums()
    if libs.is_dir() and {p.name for p in libs.glob("*.jar")} == set(wanted):
        return
    maven = shutil.which("mvn") or _apt_install("maven", "mvn")
    if not maven:
        raise ConfigError("Maven is missing and fetches Kafka: `sudo apt-get install maven` (or your system's way)")
    temporary = libs.with_name(f"{libs.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    started_s = time.monotonic()
    try:
        done = subprocess.run(
            [maven, "-q", "-B", "-f", str(kafka.HERE / "pom.xml"), COPY, f"-DoutputDirectory={temporary}"],
            capture_output=True, text=True, timeout=MAVEN_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Maven did not fetch Kafka within {MAVEN_TIMEOUT_S:g} s: try again") from None
    if done.returncode != 0:
        raise ConfigError(f"Maven could not fetch Kafka: {(done.stdout + done.stderr).strip()[-600:]}")
    if problem := difference(temporary, wanted):
        raise ConfigError(f"what Maven fetched is not what was recorded: {problem}")
    shutil.rmtree(libs, ignore_errors=True)
    # It was made of the jars that go.
    kafka.archive_of(libs).unlink(missing_ok=True)
    temporary.replace(libs)
    say(f"local stack: Kafka fetched, {len(wanted)} jars: {time.monotonic() - started_s:.0f} s download time")


def checksums() -> dict[str, str]:
    """Return jar → SHA-256 of everything the broker is made of."""
    lines = (kafka.HERE / "jars.sha256").read_text().split("\n")
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines if line)}


def difference(folder: Path, wanted: dict[str, str]) -> str | None:
    """Return what differs between a folder of jars and the recorded list; None if nothing does."""
    found = {path.name: path for path in folder.glob("*.jar")}
    for name in sorted(set(wanted) ^ set(found)):
        return f"{name} is {'missing' if name in wanted else 'not in the list'}"
    for name, path in sorted(found.items()):
        if hashlib.sha256(path.read_bytes()).hexdigest() != wanted[name]:
            return f"{name} has another SHA-256"
    return None


def ensure_libpython(venv: Path) -> None:
    """See that Triton's stub finds every library it is linked with; raises ConfigError."""
    installation = Installation.find(venv)
    missing = missing_libraries(installation)
    package = f"libpython{installation.python}"
    if any(package in name for name in missing):
        _apt_install(package, None)
        missing = missing_libraries(installation)
    if missing:
        raise ConfigError(
            f"Triton's Python backend lacks {', '.join(missing)}: `sudo apt-get install {package}`, "
            "or make .venv-triton from a Python that was built with --enable-shared"
        )


def missing_libraries(installation: Installation) -> list[str]:
    """Return the shared libraries that the loader does not find for the stub."""
    done = subprocess.run(
        ["ldd", str(installation.stub)],  # noqa: S607 - part of the C library's tools
        env={**os.environ, **installation.environment()},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]


def ensure_b64() -> None:
    """Only perf_analyzer needs libb64, and only `make bench` needs perf_analyzer: its absence is told, no error."""
    present = any((Path(folder) / "libb64.so.0d").exists() for folder in B64_FOLDERS)
    if not present and not _apt_install("libb64-0d", None):
        say("local stack: `make bench` also needs libb64: `sudo apt-get install libb64-0d`")


def _apt_install(package: str, program: str | None) -> str | None:
    """Install a package where we are root on Debian or Ubuntu; returns the program's path (or the package's name)."""
    apt = shutil.which("apt-get")
    if os.geteuid() != 0 or not apt:
        return None
    say(f"local stack: installing {package}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["install", "-y", "-q", package], ["update", "-q"], ["install", "-y", "-q", package]):
        done = subprocess.run([apt, *command], env=environment, capture_output=True, timeout=APT_TIMEOUT_S, check=False)
        if command[0] == "install" and done.returncode == 0:
            return shutil.which(program) if program else package
    return None
