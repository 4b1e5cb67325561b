"""The ledger in memory."""

from jobs.memory.ledger import MemoryLedger

__all__ = ["MemoryLedger"]
