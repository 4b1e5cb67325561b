"""Makes the peers' environments, one folder each, from their hashed locks."""

import subprocess
import sys
from collections.abc import Sequence

from benchmarks.peers.catalog import ENVIRONMENTS, LOCKS, ROOT, VENVS

LIMIT_S = 900.0


def environments(names: Sequence[str]) -> list[str]:
    """Return the named environments, each once; all where none is named."""
    return [name for name in ENVIRONMENTS if name in names or not names]


def install(names: Sequence[str]) -> int:
    """Make each environment that is missing or older than its lock; returns 0, or 1 where one could not be made."""
    failed = [name for name in environments(names) if not _made(name)]
    for name in failed:
        print(f"peers: {name} could not be installed", file=sys.stderr)
    return 1 if failed else 0


def _made(name: str) -> bool:
    folder, lock = VENVS / name, LOCKS / f"{name}.lock"
    stamp = folder / ".installed"
    if stamp.is_file() and stamp.stat().st_mtime >= lock.stat().st_mtime:
        return True
    print(f"peers: installing {name} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    python = folder / "bin" / "python"
    steps = [
        ["venv", "--quiet", "--allow-existing", "--python", sys.executable, str(folder)],
        ["pip", "sync", "--quiet", "--python", str(python), "--require-hashes", str(lock)],
    ]
    for step in steps:
        done = subprocess.run([sys.executable, "-m", "uv", *step], timeout=LIMIT_S, check=False)
        if done.returncode:
            return False
    stamp.touch()
    return True
