"""A caller's deadline, and the one place where its units are converted."""

import time
from dataclasses import dataclass

from serving.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock; it starts at the request's head and is never extended."""

    at_s: float

    @classmethod
    def after_ms(cls, milliseconds: float) -> "Deadline":
        """Return the deadline that many milliseconds from now."""
        return cls(time.monotonic() + milliseconds / 1000)

    def remaining_s(self) -> float:
        """Return the seconds left; raises DeadlineExceeded when there are none."""
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before there was an answer")
        return left

    def queue_timeout_us(self) -> int:
        """Return what is left in Triton's unit: microseconds, at least 1 (0 would mean none)."""
        return max(1, int(self.remaining_s() * 1_000_000))
