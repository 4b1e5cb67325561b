"""Become a service: set the OS priority, ask the kernel to end us with the supervisor, and run the real program.

Started as ``python -I -S child.py NICE PARENT_PID PROGRAM ARGUMENT…`` by the supervisor. A step of its own, because
code between fork and exec inside a process that has threads is not safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Never returns: the program takes the place of this process."""
    nice, parent, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(1)
    if int(nice):
        os.nice(int(nice))
    os.execvp(command[0], command)  # noqa: S606 - the supervisor's own command line


if __name__ == "__main__":
    main(sys.argv[1:])
