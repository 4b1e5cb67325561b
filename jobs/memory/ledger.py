"""The ledger in memory, put together."""

from jobs.ledger import Ledger
from jobs.memory.duties import MemoryDuties
from jobs.memory.intake import MemoryIntake
from jobs.memory.state import Clock, State, now_utc
from jobs.memory.work import MemoryWork


class MemoryLedger(MemoryIntake, MemoryWork, MemoryDuties, Ledger):
    """The ledger of one process, for tests and trials: it keeps the same contract and forgets all when it ends.

    ``clock`` gives the store's time (aware, UTC). Methods never await, so each is one step.
    """

    def __init__(self, clock: Clock = now_utc) -> None:
        self._state = State(clock)

    async def ping(self) -> None:
        """Answer."""
