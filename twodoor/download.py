"""Results as a file: written beside it, put in its place when whole, taken up where an earlier call was cut off."""

import os
from pathlib import Path
from typing import IO, Self

from twodoor.job_bodies import Progress
from twodoor.result_flows import Pieces, results_flow
from twodoor.wire import Flow


class Download:
    """One file of results. Where ``path`` is no regular file (a pipe, ``/dev/stdout``), it is written as it comes."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        job_id: str,
        only_errors: bool,
        partial: bool,
        on_progress: Progress | None,
    ) -> None:
        self._path = Path(path)
        self._job_id, self._only_errors, self._partial = job_id, only_errors, partial
        self._on_progress = on_progress
        self._direct = self._path.exists() and not self._path.is_file()
        # The beginning of one job's results must never be taken for another's.
        kind = ".errors" if only_errors else ""
        name = "".join(char if char.isalnum() or char in "_-" else "_" for char in job_id[:64])
        self._part = self._path if self._direct else self._path.with_name(f"{self._path.name}.{name}{kind}.part")
        self._opened: IO[bytes] | None = None
        self._at = 0
        self._total: int | None = None

    def __enter__(self) -> Self:
        self._opened = self._part.open("wb" if self._direct else "ab")
        self._at = 0 if self._direct else self._opened.tell()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if not self._direct and self._part.exists() and not self._part.stat().st_size:
            self._part.unlink()

    @property
    def _file(self) -> IO[bytes]:
        if self._opened is None:
            raise RuntimeError("a download is a context manager")
        return self._opened

    def flow(self, idle_timeout_s: float, outage_s: float) -> Flow[int]:
        """Return the flow that emits what is still to be written."""
        return results_flow(
            self._job_id,
            Pieces(),
            only_errors=self._only_errors,
            partial=self._partial,
            start_byte=self._at,
            idle_timeout_s=idle_timeout_s,
            outage_s=outage_s,
            on_total=self._know,
        )

    def write(self, piece: bytes) -> None:
        """Write what came."""
        self._file.write(piece)
        self._at += len(piece)
        if self._on_progress is not None:
            self._on_progress(self._at, self._total)

    def finish(self) -> int:
        """Put the file in its place and return its size in bytes."""
        self._file.close()
        if not self._direct:
            self._part.replace(self._path)
        return self._at

    def _know(self, total: int) -> None:
        self._total = total
