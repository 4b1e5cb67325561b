"""What the commands that measure do alike: refuse a busy machine, say in one line why they end, and stop at SIGTERM."""

import asyncio
import signal
import sys
from collections.abc import Callable

from benchmarks import machine
from serving.errors import TwodoorError


def say(command: str, line: str) -> None:
    """Tell what a command does, on stderr."""
    print(f"{command}: {line}", file=sys.stderr, flush=True)


def measured(command: str, force: bool, run: Callable[[dict[str, float]], int]) -> int:
    """Return ``run``'s exit code, which is given how busy the machine was before; 1 where it cannot run or is stopped."""
    before = machine.load_before()
    if before["cpu_share"] > machine.BUSY_SHARE and not force:
        say(
            command,
            f"the machine is busy: load {before['load_1min']:.2f}, other programs use {before['cpu_share']:.0%} of all cores. "
            "Figures taken now would say little; --force takes them all the same",
        )
        return 1
    try:
        return run(before)
    except TwodoorError as exc:
        say(command, str(exc))
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(command, "stopped")
        return 1


def cancel_at_sigterm() -> None:
    """Let SIGTERM cancel the task that calls this."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
