"""The object store of a chaos run: an S3-compatible server behind a fault proxy, or a folder on a small disk of our own."""

import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import SecretStr

from serving.settings import JobsSettings
from tests import s3

BUCKET = "chaos"
DISK_BYTES = 64 * 2**20
_KINDS = {"refuse": "error", "reset": "reset", "slow": "slow", "hang": "hang"}


class Store:
    """An S3-compatible server; the stack reaches it through the proxy, the invariants past it."""

    def __init__(self) -> None:
        self._server = s3.S3Server()
        self._proxy = s3.FaultProxy(self._server.port)

    def __enter__(self) -> Self:
        os.environ.update(s3.KEYS)  # for this process' own look past the proxy
        self._server.start()
        self._server.create_bucket(BUCKET)
        self._proxy.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._proxy.stop()
        self._server.stop()

    @property
    def environment(self) -> dict[str, str]:
        """What the doors need to reach it through the proxy."""
        return {
            **s3.KEYS,
            "TWODOOR_JOBS_OBJECTS_URL": f"s3://{BUCKET}/kept",
            "TWODOOR_JOBS_OBJECTS_ENDPOINT": self._proxy.endpoint,
            "TWODOOR_JOBS_OBJECTS_ALLOW_HTTP": "true",
        }

    def direct(self) -> JobsSettings:
        """Return settings that reach it past the proxy."""
        return _settings(f"s3://{BUCKET}/kept", self._server.endpoint)

    def fault(self, kind: str) -> None:
        """Fail from now on."""
        self._proxy.fault(_KINDS[kind])

    def heal(self) -> None:
        """Work again."""
        self._proxy.heal()


class FullDisk:
    """A folder on a file system of its own, which can be filled to the last byte. Needs the right to mount one."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "disk"
        self._ballast = self._folder / "ballast"

    @staticmethod
    def is_possible(home: Path) -> bool:
        """Return whether this process may mount a file system."""
        probe = home / "probe"
        probe.mkdir()
        mounted = subprocess.run(_mount(probe, 2**20), capture_output=True, check=False).returncode == 0
        if mounted:
            subprocess.run(["umount", str(probe)], capture_output=True, check=True)
        return mounted

    def __enter__(self) -> Self:
        self._folder.mkdir()
        subprocess.run(_mount(self._folder, DISK_BYTES), capture_output=True, check=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], capture_output=True, check=True)

    @property
    def _url(self) -> str:
        return f"file://{self._folder / 'objects'}"

    @property
    def environment(self) -> dict[str, str]:
        """What the doors need to use it."""
        return {"TWODOOR_JOBS_OBJECTS_URL": self._url}

    def direct(self) -> JobsSettings:
        """Return settings that reach it."""
        return _settings(self._url, "")

    def fault(self, kind: str) -> None:
        """Fill the disk: every further write is ENOSPC."""
        assert kind == "fill"
        with self._ballast.open("wb", buffering=0) as ballast:
            block = bytes(64 * 1024)
            try:
                while True:
                    ballast.write(block)
            except OSError:
                return  # no space left, which is what was wanted

    def heal(self) -> None:
        """Make room again."""
        self._ballast.unlink(missing_ok=True)


def _mount(folder: Path, size_bytes: int) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]


def _settings(url: str, endpoint: str) -> JobsSettings:
    return JobsSettings(
        database_url=SecretStr("postgresql://unused"),
        objects_url=url,
        objects_endpoint=endpoint,
        objects_allow_http=True,
    )
