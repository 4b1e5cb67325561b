"""Log files of the services: appended by the child itself, kept small by the supervisor."""

import shutil
from pathlib import Path

_TAIL_BYTES = 8192


def trim(path: Path, max_bytes: int) -> None:
    """Keep one log file under ``max_bytes``: what is there goes to ``<name>.log.1``.

    The child has the file open for appending, so it is copied and emptied, not renamed; lines written between the two
    steps are lost, which a log of a local stack can bear.
    """
    if path.exists() and path.stat().st_size > max_bytes:
        shutil.copyfile(path, path.with_suffix(".log.1"))
        with path.open("r+b") as handle:
            handle.truncate()


def tail(path: Path, lines: int = 1) -> list[str]:
    """Return the last lines of a log that hold anything."""
    if not path.exists():
        return []
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = handle.read().decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()][-lines:]
