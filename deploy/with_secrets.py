"""Start of a container: each file in /run/secrets that is named like a variable becomes that variable; then the command.

Usage: with_secrets.py MODULE ARGUMENT…   runs ``python -m MODULE ARGUMENT…`` in place of this process.
So neither compose.yaml nor `docker inspect` shows a secret. Standard library only.
"""

import os
import re
import sys
from pathlib import Path

SECRETS = Path("/run/secrets")


def main(arguments: list[str], secrets: Path = SECRETS) -> None:
    """Never returns. A variable that is set already wins over a file."""
    for path in sorted(secrets.iterdir()) if secrets.is_dir() else ():
        if re.fullmatch(r"[A-Z][A-Z0-9_]*", path.name):
            os.environ.setdefault(path.name, path.read_text(encoding="utf-8").strip())
    os.execv(sys.executable, [sys.executable, "-m", *arguments])  # noqa: S606 - the image's own command line


if __name__ == "__main__":
    main(sys.argv[1:])
