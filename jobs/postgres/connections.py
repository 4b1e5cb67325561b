"""Connections to PostgreSQL: a few, each statement a transaction of its own with a deadline, no session state.

A pool that queues callers and backs off while the server is away would make a refusal slow and a recovery late. Here a
caller hears at once that nobody answers, and the first call after the server is back succeeds.
"""

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from serving.errors import ConfigError, DependencyDown
from serving.settings import JobsSettings

Row = dict[str, Any]
Connection = psycopg.AsyncConnection[Row]
Parameters = Sequence[Any] | Mapping[str, Any]

log = structlog.get_logger("jobs.postgres")

_CANCEL_TIMEOUT_S = 0.5


class Connections:
    """At most ``database_connections`` connections, made when they are needed; an async context manager."""

    def __init__(self, settings: JobsSettings) -> None:
        self._url = settings.database_url.get_secret_value()
        self._timeout_s = settings.database_timeout_s
        self._free = asyncio.Semaphore(settings.database_connections)
        self._idle: list[Connection] = []
        self._away_since: float | None = None
        try:
            self._password = str(conninfo_to_dict(self._url).get("password") or "")
        except psycopg.ProgrammingError:
            # Its text may quote the password.
            raise ConfigError("TWODOOR_JOBS_DATABASE_URL is not a postgresql:// URL") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._drop_idle()

    async def fetch(self, statement: str, parameters: Parameters = (), extra_s: float = 0.0) -> list[Row]:
        """Run one statement and return its rows; raises DependencyDown at the deadline (``extra_s`` later for big ones).

        A connection that broke while it lay idle is replaced and the statement tried again: all of ours may be repeated.
        """
        with self._translated():
            end = time.monotonic() + self._timeout_s + extra_s
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
            try:
                rows = await self._fetch(statement, parameters, end)
            finally:
                self._free.release()
        self._say_back()
        return rows

    async def _fetch(self, statement: str, parameters: Parameters, end: float) -> list[Row]:
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect(end)
            try:
                rows = await self._run(connection, statement, parameters, end)
            except psycopg.OperationalError:
                if not (connection.closed and reused):
                    raise
                # The server was away for a moment: all that lay idle has broken with it.
                await self._drop_idle()
            else:
                return rows
            finally:
                await self._give_back(connection)

    async def _connect(self, end: float) -> Connection:
        left_s = end - time.monotonic()
        async with asyncio.timeout(left_s):
            return await psycopg.AsyncConnection.connect(
                self._url,
                row_factory=dict_row,
                autocommit=True,
                # PgBouncer in transaction mode hands each statement to another server connection.
                prepare_threshold=None,
                connect_timeout=max(2, round(self._timeout_s)),
                application_name="twodoor",
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=3,
                tcp_user_timeout=round(1000 * self._timeout_s),
            )

    async def _run(self, connection: Connection, statement: str, parameters: Parameters, end: float) -> list[Row]:
        query = asyncio.create_task(_query(connection, statement, parameters))
        try:
            done, _ = await asyncio.wait({query}, timeout=max(0.0, end - time.monotonic()))
            if not done:
                raise TimeoutError("no answer within the deadline")
            return query.result()
        finally:
            if not query.done():
                await _abandon(connection, query)

    async def _give_back(self, connection: Connection) -> None:
        idle = psycopg.pq.TransactionStatus.IDLE
        if connection.closed or connection.info.transaction_status != idle:
            await connection.close()
        else:
            self._idle.append(connection)

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """The one place where psycopg's errors become ours: whatever may pass by itself is DependencyDown."""
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError, TimeoutError) as exc:
            self._say_away(exc)
            raise DependencyDown("the ledger does not answer") from exc
        except (
            psycopg.errors.UndefinedTable,
            psycopg.errors.UndefinedFunction,
            psycopg.errors.InvalidSchemaName,
        ) as exc:
            self._say_away(exc, advice="run `twodoor migrate`")
            raise DependencyDown("the ledger is not ready") from exc

    def _say_away(self, exc: Exception, **more: str) -> None:
        text = str(exc).strip()
        reason = text.replace(self._password, "***") if self._password else text
        if isinstance(exc, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure):
            log.warning("ledger_statement_lost", reason=reason)
        elif self._away_since is None:
            self._away_since = time.monotonic()
            log.warning("ledger_away", error=type(exc).__name__, reason=reason, **more)

    def _say_back(self) -> None:
        if self._away_since is not None:
            log.info("ledger_back", away_s=round(time.monotonic() - self._away_since, 3))
            self._away_since = None


async def _query(connection: Connection, statement: str, parameters: Parameters) -> list[Row]:
    cursor = await connection.execute(statement.encode(), parameters)
    return await cursor.fetchall() if cursor.description else []


async def _abandon(connection: Connection, query: "asyncio.Task[list[Row]]") -> None:
    """End a statement whose time is over: ask the server to cancel it, then cut the connection under it. Takes at most
    twice the time of a cancel; cancelling the task instead would wait for a server that hangs."""
    with suppress(psycopg.Error, OSError):
        await connection.cancel_safe(timeout=_CANCEL_TIMEOUT_S)
        await asyncio.wait({query}, timeout=_CANCEL_TIMEOUT_S)
    if not query.done():
        with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(connection.fileno())) as cut:
            cut.shutdown(socket.SHUT_RDWR)
    with suppress(psycopg.Error):
        await query
