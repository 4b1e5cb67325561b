"""The ledger's migrations: plain SQL files, applied in the order of their numbers."""
