"""The ledger over a PostgreSQL that is away, hangs, comes back or was never migrated; and its migrations."""

import asyncio
import json
import os
import subprocess
import sys
import time

import psycopg
import pytest

from jobs import migrations
from jobs.ledger import job_prefix
from jobs.postgres import connections, open_ledger
from jobs.states import Status
from serving.errors import ConfigError, DependencyDown
from tests.conftest import PostgresFactory
from tests.contract.ledgers import MODELS, accept, claim, done, jobs_settings, new_job, plans, postgres_store
from tests.parts import ROOT, Postgres, free_ports


class Recorder:
    """Stands for the log."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def warning(self, event: str, **more: object) -> None:
        self.lines.append((event, more))

    info = warning


@pytest.fixture(scope="module")
def own_server(postgres_factory: PostgresFactory) -> Postgres:
    """A server that these tests may kill and freeze."""
    return postgres_factory()


async def test_connections_that_broke_while_idle_are_replaced_unnoticed(own_server: Postgres) -> None:
    url = own_server.new_database()
    async with postgres_store(url) as store:
        await asyncio.gather(*(store.ledger.ping() for _ in range(4)))
        own_server.restart()
        job = await accept(store.ledger)
        assert (await store.ledger.get("default", job.id)).status is Status.QUEUED


async def test_an_absent_server_is_said_at_once_once_and_without_the_password(
    own_server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Recorder()
    monkeypatch.setattr(connections, "log", log)
    url = own_server.new_database()
    password = url.split(":")[2].split("@")[0]
    async with postgres_store(url) as store:
        await store.ledger.ping()
        own_server.kill()
        began = time.monotonic()
        for _ in range(3):
            with pytest.raises(DependencyDown) as refused:
                await store.ledger.claim("c1", MODELS, (), 30)
        assert time.monotonic() - began < 2
        own_server.start()
        await store.ledger.ping()
        await store.ledger.ping()
    assert [event for event, _ in log.lines] == ["ledger_away", "ledger_back"]
    assert password not in repr(log.lines) + repr(refused.value) + repr(refused.value.__cause__)


async def test_a_server_that_hangs_costs_one_deadline_and_all_works_when_it_goes_on(own_server: Postgres) -> None:
    async with postgres_store(own_server.new_database(), database_timeout_s=0.5) as store:
        job = await accept(store.ledger, 2)
        found = await claim(store.ledger)
        own_server.freeze()
        try:
            began = time.monotonic()
            with pytest.raises(DependencyDown):
                await store.ledger.complete(found, done(found))
            assert time.monotonic() - began < 3
        finally:
            own_server.thaw()
        assert await store.ledger.complete(found, done(found)), (
            "it may have been done already: the same claim hears yes"
        )
        assert (await store.ledger.get("default", job.id)).rows_succeeded == 10


async def test_a_statement_that_waits_too_long_for_a_lock_is_given_up(database_url: str) -> None:
    async with postgres_store(database_url, database_timeout_s=0.4, database_connections=1) as store:
        job = await accept(store.ledger)
        async with await psycopg.AsyncConnection.connect(database_url) as other:
            await other.execute("SELECT FROM twodoor.jobs FOR UPDATE")
            with pytest.raises(DependencyDown):
                await store.ledger.cancel("default", job.id)
        assert (await store.ledger.get("default", job.id)).status is Status.QUEUED
        assert (await store.ledger.cancel("default", job.id))[1]


async def test_a_caller_that_is_cancelled_leaves_no_statement_and_no_connection_behind(database_url: str) -> None:
    async with postgres_store(database_url, database_connections=1) as store:
        job = await accept(store.ledger)
        async with await psycopg.AsyncConnection.connect(database_url) as other:
            await other.execute("SELECT FROM twodoor.jobs FOR UPDATE")
            asked = asyncio.create_task(store.ledger.cancel("default", job.id))
            await asyncio.wait({asked}, timeout=0.2)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        assert (await store.ledger.get("default", job.id)).status is Status.QUEUED


async def test_a_job_of_twenty_thousand_chunks_is_accepted_whole(database_url: str) -> None:
    async with postgres_store(database_url, database_timeout_s=2) as store:
        new = new_job(200_000)
        await store.ledger.accept(new, plans(200_000))
        assert (await store.ledger.duties())["chunk"] == 20_000
        for _ in range(3):
            found = await claim(store.ledger)
            assert await store.ledger.complete(found, done(found))
        assert len(await store.ledger.parts("default", new.id)) == 3


async def test_the_states_and_prefixes_of_the_sql_are_those_of_the_code(database_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        cursor = await connection.execute(
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'jobs_status_check'"
        )
        row = await cursor.fetchone()
        assert row is not None
        assert {part.split("'")[0] for part in row[0].split("'")[1::2]} == {status.value for status in Status}
        cursor = await connection.execute("SELECT prosrc FROM pg_proc WHERE proname = 'bury_job'")
        row = await cursor.fetchone()
        assert row is not None
        assert job_prefix("' || p_id || '") in row[0]


async def test_a_database_that_was_never_migrated_is_refused_with_the_remedy(own_server: Postgres) -> None:
    url = await empty_database(own_server)
    with pytest.raises(ConfigError, match="run `twodoor migrate`"):
        async with open_ledger(jobs_settings(url)):
            pass


async def test_a_ledger_opens_while_its_database_is_away() -> None:
    (port,) = free_ports(1)
    async with open_ledger(jobs_settings(f"postgresql://u:secret@127.0.0.1:{port}/d")) as ledger:
        with pytest.raises(DependencyDown):
            await ledger.ping()


def test_a_url_that_is_none_is_refused_without_quoting_it() -> None:
    with pytest.raises(ConfigError) as refused:
        connections.Connections(jobs_settings("postgresql://u:pass%zzword@h/d"))
    assert "zzword" not in repr(refused.value)


async def empty_database(server: Postgres) -> str:
    """A database that belongs to the ledger's role and holds nothing."""
    url = server.new_database()
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("DROP SCHEMA twodoor CASCADE")
    return url


async def test_two_migrators_at_once_apply_each_migration_once(own_server: Postgres) -> None:
    url = await empty_database(own_server)
    one, two, three = await asyncio.gather(*(migrations.migrate(url) for _ in range(3)))
    names = [migration.name for migration in migrations.load()]
    assert sorted(map(list, (one.applied, two.applied, three.applied))) == [[], [], names]
    assert {one.version, two.version, three.version} == {migrations.latest()}


async def test_migrate_says_what_it_did_and_its_exit_code_tells_what_went_wrong(own_server: Postgres) -> None:
    url = await empty_database(own_server)
    code, said, _ = twodoor_migrate(url)
    assert (code, said["version"]) == (0, migrations.latest())
    assert said["applied"] == [migration.name for migration in migrations.load()]
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("INSERT INTO twodoor.schema_migrations (version, name) VALUES (9999, 'x')")
    code, _, error = twodoor_migrate(url)
    assert code == 1
    assert "newer than this code" in error
    assert twodoor_migrate("")[0] == 2
    (port,) = free_ports(1)
    code, _, error = twodoor_migrate(f"postgresql://u:hush@127.0.0.1:{port}/d")
    assert code == 3
    assert "hush" not in error


def twodoor_migrate(url: str) -> tuple[int, dict[str, object], str]:
    result = subprocess.run(
        [sys.executable, "-m", "twodoor", "migrate", "--json"],
        env={**os.environ, "TWODOOR_JOBS_DATABASE_URL": url}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return result.returncode, json.loads(result.stdout) if result.stdout else {}, result.stderr


async def test_claims_go_on_while_a_submission_of_their_tenant_is_held_up(database_url: str) -> None:
    async with postgres_store(database_url, database_timeout_s=2) as store:
        await accept(store.ledger, 3)
        async with await psycopg.AsyncConnection.connect(database_url) as other:
            # Like a submission that is still inserting its chunks: an idempotency key that is not decided yet.
            await other.execute("INSERT INTO twodoor.idempotency VALUES ('default', 'k', 'job_x', '', now())")
            submitted = asyncio.create_task(accept(store.ledger, 1, idempotency_key="k"))
            found = await claim(store.ledger)
            assert await store.ledger.complete(found, done(found))
            assert not submitted.done()
            await other.rollback()
        assert (await submitted).status is Status.QUEUED
