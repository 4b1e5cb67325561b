"""The end of a process that a measurement has started."""

import subprocess


def end(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """Ask it to end; kill it where it has not done so in time."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
