"""The ledger's migrations: plain SQL files, applied in the order of their numbers, each once.

A migration only adds to what the release before it needs: old doors go on working while new ones come up.
"""

import asyncio
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from serving.errors import ConfigError, DependencyDown

__all__ = ["ConfigError", "DependencyDown", "Migrated", "Migration", "check_version", "latest", "load", "migrate"]

if TYPE_CHECKING:
    from psycopg import AsyncConnection

MIGRATE_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 10
# Any number will do, as long as all migrators of one database take the same.
_LOCK = 0x74776F646F6F72


class Migration(NamedTuple):
    """One file: its number, its name and its statements."""

    version: int
    name: str
    sql: str


class Migrated(NamedTuple):
    """What a run has done: the names it applied, and the version the database is at now."""

    applied: Sequence[str]
    version: int

    @property
    def summary(self) -> str:
        """What was done, in one line."""
        done = f"applied {', '.join(self.applied)}" if self.applied else "nothing to apply"
        return f"{done}; the ledger's database is at version {self.version}"


def load() -> Sequence[Migration]:
    """Return all migrations in order."""
    found = sorted((entry for entry in files(__name__).iterdir() if entry.name.endswith(".sql")), key=lambda e: e.name)
    return [Migration(int(entry.name.split("_", 1)[0]), entry.name, entry.read_text("utf-8")) for entry in found]


def latest() -> int:
    """Return the version this code needs."""
    return load()[-1].version


async def migrate(database_url: str, timeout_s: float = MIGRATE_TIMEOUT_S) -> Migrated:
    """Bring a database to this code's version in one transaction; several migrators at once wait for one another.

    Raises DependencyDown where nobody answers, ConfigError where the database is newer than the code, the URL is none
    or the role may not do it.
    """
    import psycopg

    try:
        async with asyncio.timeout(timeout_s):
            connection = await _connect(database_url)
            async with connection:
                return await _apply(connection)
    except (psycopg.OperationalError, TimeoutError) as exc:
        raise DependencyDown("the ledger's database does not answer, or refuses the connection") from exc
    except psycopg.Error as exc:
        raise ConfigError(f"the ledger's database refuses the migration: {exc.diag.message_primary}") from exc


async def _connect(database_url: str) -> "AsyncConnection":
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        conninfo_to_dict(database_url)
    except psycopg.ProgrammingError:
        # Its text may quote the password.
        raise ConfigError("TWODOOR_JOBS_DATABASE_URL is not a postgresql:// URL") from None
    return await psycopg.AsyncConnection.connect(
        database_url, prepare_threshold=None, connect_timeout=_CONNECT_TIMEOUT_S, application_name="twodoor migrate"
    )


async def _apply(connection: "AsyncConnection") -> Migrated:
    await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
    await connection.execute("CREATE SCHEMA IF NOT EXISTS twodoor")
    await connection.execute(
        "CREATE TABLE IF NOT EXISTS twodoor.schema_migrations"
        " (version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
    )
    cursor = await connection.execute("SELECT COALESCE(max(version), 0) FROM twodoor.schema_migrations")
    row = await cursor.fetchone()
    version = int(row[0]) if row else 0
    migrations = load()
    if version > migrations[-1].version:
        raise ConfigError(
            f"the ledger's database is at version {version}, newer than this code ({migrations[-1].version}):"
            " install the newer Twodoor"
        )
    due = [migration for migration in migrations if migration.version > version]
    for migration in due:
        await connection.execute(migration.sql.encode())
        await connection.execute(
            "INSERT INTO twodoor.schema_migrations (version, name) VALUES (%s, %s)", (migration.version, migration.name)
        )
    return Migrated([migration.name for migration in due], migrations[-1].version)


# For a door: two statements, because the second one fails where there is no table.
VERSION_TABLE = "SELECT to_regclass('twodoor.schema_migrations') IS NOT NULL AS present"
VERSION = "SELECT COALESCE(max(version), 0) AS version FROM twodoor.schema_migrations"


def check_version(version: int) -> None:
    """Raise ConfigError where a database at ``version`` (0: never migrated) is too old for this code.

    A newer one is fine: see above.
    """
    if version < latest():
        raise ConfigError(
            f"the ledger's database is at version {version}, this code needs {latest()}: run `twodoor migrate`"
        )
