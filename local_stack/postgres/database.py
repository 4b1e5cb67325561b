"""The database inside the server: asked whether it answers, made where it is missing, brought to the newest schema."""

import asyncio
import os
import sys
from pathlib import Path

import psycopg
from psycopg import sql

from local_stack import postgres
from serving.settings import StackSettings

ASK_TIMEOUT_S = 5
MIGRATE_TIMEOUT_S = 60.0
_NEW = f"{postgres.DATABASE}_new"


async def answers(stack: StackSettings) -> bool:
    """Whether our database answers a query."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            async with await _connect(stack, postgres.ROLE, postgres.DATABASE) as connection:
                await connection.execute("SELECT 1")
    except (psycopg.Error, OSError, TimeoutError):
        return False
    return True


async def ensure_database(stack: StackSettings) -> str | None:
    """Make our role and database where they are missing; None where the server does not answer yet.

    Returns the name of the database to bring to the newest schema. A new one has another name until ``publish``: a door
    that found it without a schema would end.
    """
    try:
        async with asyncio.timeout(2 * ASK_TIMEOUT_S):
            async with await _connect(stack, postgres.ADMIN, "postgres") as connection:
                return await _create(connection, postgres.password(stack))
    except (psycopg.Error, OSError, TimeoutError):
        return None


async def publish(stack: StackSettings, name: str) -> bool:
    """Give a new database, which nobody is connected to, its name; False where the server does not answer."""
    if name == postgres.DATABASE:
        return True
    statement = sql.SQL("ALTER DATABASE {} RENAME TO {}").format(
        sql.Identifier(name), sql.Identifier(postgres.DATABASE)
    )
    try:
        async with asyncio.timeout(2 * ASK_TIMEOUT_S):
            async with await _connect(stack, postgres.ADMIN, "postgres") as connection:
                await connection.execute(statement)
    except (psycopg.Error, OSError, TimeoutError):
        return False
    return True


async def migrate(database_url: str) -> str | None:
    """Bring the database to the newest schema; returns what went wrong, in one line.

    A process of its own, because this package does not know what is kept of a job.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jobs.migrations",
        env={**os.environ, "TWODOOR_JOBS_DATABASE_URL": database_url, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(MIGRATE_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return f"the migration did not end within {MIGRATE_TIMEOUT_S:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = output.decode(errors="replace").strip().splitlines()
    return None if process.returncode == 0 else f"the migration failed: {lines[-1][:300] if lines else 'no word'}"


async def _connect(stack: StackSettings, user: str, database: str) -> psycopg.AsyncConnection:
    return await psycopg.AsyncConnection.connect(
        postgres.url(stack, user, database), autocommit=True, connect_timeout=ASK_TIMEOUT_S
    )


async def _create(connection: psycopg.AsyncConnection, password: str) -> str:
    role, new = sql.Identifier(postgres.ROLE), sql.Identifier(_NEW)
    found = await connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [postgres.ROLE])
    if not found.rowcount:
        # Hashed here: the statement, which an error would write to the server's log, must not hold the password.
        hashed = connection.pgconn.encrypt_password(password.encode(), postgres.ROLE.encode(), b"scram-sha-256")
        await connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(hashed.decode())))
    found = await connection.execute("SELECT FROM pg_database WHERE datname = %s", [postgres.DATABASE])
    if found.rowcount:
        return postgres.DATABASE
    # What a start that was cut short left behind holds nothing.
    await connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(new))
    await connection.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(new, role))
    return _NEW
