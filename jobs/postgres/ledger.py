"""The ledger over PostgreSQL, put together, and how it is opened."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from jobs import migrations
from jobs.ledger import Ledger
from jobs.postgres.connections import Connections
from jobs.postgres.duties import PostgresDuties
from jobs.postgres.intake import PostgresIntake
from jobs.postgres.work import PostgresWork
from serving.errors import DependencyDown
from serving.settings import JobsSettings


class PostgresLedger(PostgresIntake, PostgresWork, PostgresDuties, Ledger):
    """The ledger of several processes and machines: each method one statement, and so one transaction."""

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)

    async def ping(self) -> None:
        await self._db.fetch("SELECT 1")

    async def check_version(self) -> None:
        """Raise ConfigError where the database was not migrated for this code, DependencyDown where it is away."""
        rows = await self._db.fetch(migrations.VERSION_TABLE)
        if rows[0]["present"]:
            rows = await self._db.fetch(migrations.VERSION)
        migrations.check_version(int(rows[0].get("version", 0)))


@asynccontextmanager
async def open_ledger(settings: JobsSettings) -> AsyncIterator[PostgresLedger]:
    """Open the ledger. A database that is away is no error (the methods say so, and it may come); one that answers and
    was not migrated is: ConfigError says to run `twodoor migrate`."""
    async with Connections(settings) as connections:
        ledger = PostgresLedger(connections)
        with suppress(DependencyDown):  # it has been logged, and each method will say it again
            await ledger.check_version()
        yield ledger
