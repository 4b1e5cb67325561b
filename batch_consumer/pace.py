"""How many micro-batches may be in flight, and how long to wait before the next try. Pure."""

import random

SUCCESSES_PER_STEP = 20
# So often a chunk may be claimed before it rests: kills, restarts and lost leases end most claims that end early.
CLAIMS_WITHOUT_REST = 5
MAX_REST_S = 30.0


class Pace:
    """The bound of micro-batches in flight for one model: halved when Triton's queue is full, then raised step by step.

    Several consumers share one Triton without knowing of each other; its full queue is how they learn.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._successes = 0
        self.limit = most

    def of(self, most: int) -> int:
        """Return the limit, where at most ``most`` keep the instances busy: that is known once the model is."""
        if most != self._most:
            self.limit = most if self.limit == self._most else min(self.limit, most)
            self._most = most
        return self.limit

    def refused(self) -> None:
        """Triton's queue was full."""
        self.limit = max(1, self.limit // 2)
        self._successes = 0

    def succeeded(self) -> None:
        """A micro-batch was answered."""
        self._successes += 1
        if self._successes >= SUCCESSES_PER_STEP and self.limit < self._most:
            self.limit += 1
            self._successes = 0


class Backoff:
    """Growing pauses with jitter, so that many consumers do not come back at the same moment."""

    def __init__(self, most_s: float, first_s: float = 0.1) -> None:
        self._first_s = min(first_s, most_s)
        self._most_s = most_s
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Return the next pause: between half of its nominal length and the whole, in seconds."""
        pause = self._next_s * random.uniform(0.5, 1.0)  # noqa: S311 (jitter, no secret)
        self._next_s = min(self._most_s, self._next_s * 2)
        return pause

    def reset(self) -> None:
        """Start small again."""
        self._next_s = self._first_s


def rest_s(generation: int) -> float:
    """Return how long a chunk rests before its ``generation``-th claim is worked on, in seconds.

    Something in it may end the process that works on it. Then all others, records too, need time between two such ends.
    """
    over = generation - CLAIMS_WITHOUT_REST
    if over <= 0:
        return 0.0
    most_s = min(MAX_REST_S, 2.0 ** min(over - 1, 16))
    # Widely spread, so that those that were only beside it get done before it comes again.
    return most_s * random.uniform(0.25, 1.0)  # noqa: S311 (jitter, no secret)
