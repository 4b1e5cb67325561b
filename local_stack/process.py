"""One operating system process: who it is (so that no stranger is ever killed), and how it is started and ended."""

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Identity:
    """A process for ever: a pid alone may be given to a stranger later.

    ``started`` is the kernel's start time in clock ticks since boot, ``boot`` the id of that boot.
    """

    pid: int
    started: int
    boot: str

    @property
    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return boot_id() == self.boot and start_ticks(self.pid) == self.started

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group that this process leads or led; gone is fine.

        A pid is not given away while a group of that number has a member, so the only stranger is a new leader.
        """
        if boot_id() != self.boot or start_ticks(self.pid) not in (None, self.started):
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    def signal(self, number: int) -> None:
        """Send a signal to this process if it is still the same; gone is fine."""
        if not self.alive:
            return
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def identify(pid: int) -> Identity | None:
    """Return the identity of a running process."""
    started = start_ticks(pid)
    return None if started is None else Identity(pid, started, boot_id())


def command_line(pid: int) -> list[str]:
    """Return a process's arguments; empty if it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [part.decode(errors="replace") for part in raw.split(b"\0")[:-1]]


def children(pid: int) -> list[int]:
    """Return the pids of a process's direct children."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] not in ("Z", "X"):
            found.append(int(entry.name))
    return sorted(found)


def wrapped(command: Sequence[str], nice: int, as_owner_of: Path | None = None, tied: bool = True) -> list[str]:
    """Return the command line that starts ``command`` as a child, at an OS priority.

    ``as_owner_of``: where we are root and that folder's owner is not, the child runs as its owner. ``tied``: it ends
    with the thread that starts it.
    """
    user, parent = "-", str(os.getpid()) if tied else "-"
    if as_owner_of is not None and os.geteuid() == 0 and (owner := as_owner_of.stat()).st_uid != 0:
        user = f"{owner.st_uid}:{owner.st_gid}"
    return [sys.executable, "-I", "-S", str(CHILD), str(nice), parent, user, *command]


def ours(identity: Identity, command: Sequence[str]) -> bool:
    """Whether a recorded process still runs and is what was recorded (it may still be becoming it)."""
    if not identity.alive:
        return False
    line = command_line(identity.pid)
    return line == list(command) or line[-len(command) :] == list(command)


def end(processes: Iterable[Identity], timeout_s: float) -> None:
    """Ask processes to end, wait, then kill what is left of each with its whole process group. Blocks."""
    waiting = list(processes)
    for process in waiting:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while any(p.alive for p in waiting) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in waiting:
        process.signal_group(signal.SIGKILL)
    while any(p.alive for p in waiting) and time.monotonic() < deadline + 2:
        time.sleep(_POLL_S)


def merged(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with others laid over it."""
    result = dict(os.environ)
    for environment in environments:
        result.update(environment)
    return result
