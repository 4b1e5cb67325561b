"""The ledger over PostgreSQL."""

from jobs.postgres.ledger import PostgresLedger, open_ledger

__all__ = ["PostgresLedger", "open_ledger"]
