"""``python -m jobs.migrations``: bring the database of TWODOOR_JOBS_DATABASE_URL to this code's version.

Exit codes: 0 done, 1 failed (also: the database is newer than this code), 2 no URL is set, 3 nobody answers.
"""

import asyncio
import os
import sys

from jobs.migrations import migrate
from serving.errors import ConfigError, DependencyDown


def main() -> int:
    """Migrate, say in one line what was done, and return the exit code."""
    url = os.environ.get("TWODOOR_JOBS_DATABASE_URL", "")
    if not url:
        return _complain("TWODOOR_JOBS_DATABASE_URL is not set", 2)
    try:
        done = asyncio.run(migrate(url))
    except ConfigError as exc:
        return _complain(str(exc), 1)
    except DependencyDown as exc:
        return _complain(str(exc), 3)
    sys.stdout.write(f"{done.summary}\n")
    return 0


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"migrations: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
