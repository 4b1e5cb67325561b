"""Named moments at which a test may kill or stop this process; without the two variables a call does nothing."""

import os
import signal

CRASH_VARIABLE = "TWODOOR_TEST_CRASHPOINT"
STOP_VARIABLE = "TWODOOR_TEST_STOPPOINT"


class _Plan:
    """Which signal is due at which pass of which moment: the variables hold ``name`` or ``name:nth``."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[int, signal.Signals]] = {}
        for variable, number in ((CRASH_VARIABLE, signal.SIGKILL), (STOP_VARIABLE, signal.SIGSTOP)):
            name, _, nth = os.environ.get(variable, "").partition(":")
            if name:
                self._due[name] = (int(nth or 1), number)

    def reach(self, name: str) -> None:
        if name not in self._due:
            return
        left, number = self._due[name]
        self._due[name] = (left - 1, number)
        if left == 1:
            os.kill(os.getpid(), number)


_plan: _Plan | None = None


def crashpoint(name: str) -> None:
    """Mark a moment that matters. SIGKILL or SIGSTOP hits this process here if a test asked for it."""
    global _plan  # the environment is read at the first call, not at import
    if _plan is None:
        _plan = _Plan()
    _plan.reach(name)
