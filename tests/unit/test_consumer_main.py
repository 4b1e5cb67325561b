"""The consumer process gives way to the interactive door with every thread it has, those of libraries included."""

import subprocess
import sys

from tests.parts import ROOT

CODE = """
import os, threading
from pathlib import Path
may_end = threading.Event()
other = threading.Thread(target=may_end.wait)
other.start()
from batch_consumer.__main__ import _give_way
_give_way(7)
_give_way(3)
print({os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in Path("/proc/self/task").iterdir()})
may_end.set()
"""


def test_every_thread_gives_way_and_none_comes_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "{7}"
