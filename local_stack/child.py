"""Become a service: set the OS priority, ask the kernel to end us with the supervisor, and run the real program.

Started as ``python -I -S child.py NICE PARENT_PID USER PROGRAM ARGUMENT…`` by the supervisor; USER is ``UID:GID`` or
``-``, and PARENT_PID may be ``-`` (it outlives its parent). A step of its own, because code between fork and exec inside a process that has threads is not safe.
"""

import ctypes
import os
import signal
import sys

PR_SET_KEEPCAPS, PR_CAPBSET_READ, PR_SET_PDEATHSIG, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 23, 1, 47, 2
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
CAPABILITY_VERSION_3 = 0x20080522
libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> None:
    """Never returns: the program takes the place of this process."""
    nice, parent, user, *command = arguments
    if int(nice):
        os.nice(int(nice))
    if user != "-":
        become(*map(int, user.split(":")))
    if parent != "-":
        # After the change of user, which makes the kernel forget it.
        check("prctl(PR_SET_PDEATHSIG)", libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0))
        if os.getppid() != int(parent):  # it died before the line above
            sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 - the supervisor's own command line


def become(uid: int, gid: int) -> None:
    """Give up root, for a program that refuses to run as root.

    Reading what root may read is all that is kept: root's own folders, where program and state lie, stay closed to
    others that way, and nobody has to open them.
    """
    has = [c for c in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE) if libc.prctl(PR_CAPBSET_READ, c, 0, 0, 0) == 1]
    check("prctl(PR_SET_KEEPCAPS)", libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if has:
        mask = 1 << has[0]
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        check("capset", libc.capset(header, (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)))
        check("prctl(PR_CAP_AMBIENT)", libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, has[0], 0, 0))


def check(call: str, result: int) -> None:
    """Raise OSError where a call of the C library failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), call)


if __name__ == "__main__":
    main(sys.argv[1:])
