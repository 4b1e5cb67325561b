"""PostgreSQL gives each of its processes a session of its own, and the kernel then lets sessions compete as equals.

So each of them gets, beside its nice value, the same value for its session (the kernel's autogroup).
"""

import asyncio
from pathlib import Path

from local_stack.process import children

LOOK_INTERVAL_S = 2.0


async def keep_nice(pid: int, nice: int) -> None:
    """Look for new processes of the server ``pid``, for ever."""
    done: set[int] = set()
    while True:
        done = await asyncio.to_thread(_make_nice, pid, nice, done)
        await asyncio.sleep(LOOK_INTERVAL_S)


def _make_nice(pid: int, nice: int, done: set[int]) -> set[int]:
    """Return which of the server's children have the value now."""
    now = set(children(pid))
    for child in now - done:
        try:
            Path(f"/proc/{child}/autogroup").write_text(str(nice))
        except OSError:  # it is gone, the kernel knows no such groups, or lets us set only ten a second
            now.discard(child)
    return now
