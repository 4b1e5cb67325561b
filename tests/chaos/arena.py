"""The place of a chaos run: two consumers, every real part, and an object store that can be made to fail."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
import psycopg
from psycopg.rows import dict_row

from jobs.objects import Objects, open_objects
from local_stack.stack import Stack
from tests.chaos.store import FullDisk, Store
from tests.parts import wait_until

# Short times, so that within one round a lease runs out, a group gives a member up and the sweeper comes by.
LEASE_S = 3.0
ENVIRONMENT = {
    "TWODOOR_JOBS_CHUNK_ROWS": "32",
    "TWODOOR_JOBS_UPLOAD_TTL_S": "4",
    "TWODOOR_JOBS_ORPHAN_GRACE_S": "3",
    "TWODOOR_JOBS_SWEEP_INTERVAL_S": "1",
    "TWODOOR_JOBS_OBJECTS_TIMEOUT_S": "3",
    "TWODOOR_JOBS_DATABASE_TIMEOUT_S": "2",
    "TWODOOR_CONSUMER_LEASE_S": str(LEASE_S),
    "TWODOOR_CONSUMER_LEASE_RENEWAL_S": "0.5",
    "TWODOOR_CONSUMER_DUTY_INTERVAL_S": "0.5",
    "TWODOOR_CONSUMER_KAFKA_CHECK_INTERVAL_S": "0.3",
    "TWODOOR_CONSUMER_KAFKA_TIMEOUT_S": "3",
    "TWODOOR_CONSUMER_SESSION_TIMEOUT_MS": "6000",
    "TWODOOR_CONSUMER_RETRY_BACKOFF_MAX_S": "1",
    "TWODOOR_CONSUMER_WINDOW_RECORDS": "64",
    "TWODOOR_CONSUMER_TRANSACTION_RECORDS": "16",
    "TWODOOR_CONSUMER_COMMIT_INTERVAL_MS": "50",
    "TWODOOR_CONSUMER_DRAIN_TIMEOUT_S": "5",
    "TWODOOR_STACK_RESTART_BACKOFF_MAX_S": "1",
    "TWODOOR_KAFKA_PARTITIONS": "4",
}
DOORS = ("gateway", "consumer", "consumer-2")


class Arena:
    """Opens everything at the start of the ``with`` block and leaves nothing behind."""

    def __init__(self, home: Path, store: Store | FullDisk, environment: Mapping[str, str] | None = None) -> None:
        self.store = store
        self._exits = ExitStack()
        self._home = home
        self._more = dict(environment or {})
        self.stack: Stack
        self.results_from: dict[int, int] = {}
        """Partition → offset of the result topic at which this round's results begin."""

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            exits.enter_context(self.store)
            environment = {**ENVIRONMENT, **self.store.environment, **self._more}
            self.stack = Stack(self._home / "stack", consumers=2, environment=environment)
            exits.enter_context(self.stack)
            self._audit()
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    # -- looking at the ledger with plain SQL, sharing no code with the product -----------------------------------------

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        with psycopg.connect(
            self.stack.database_url, autocommit=True, connect_timeout=3, row_factory=dict_row, prepare_threshold=None
        ) as connection:
            yield connection

    def query(self, sql: str, **values: object) -> list[dict[str, Any]]:
        """Return the rows of a query; raises psycopg.Error while Postgres is away."""
        with self._connection() as connection:
            return connection.execute(sql, values).fetchall()

    def execute(self, sql: str) -> None:
        """Carry out statements, if any."""
        if sql:
            with self._connection() as connection:
                connection.execute(sql)

    def count(self, sql: str) -> int:
        """Return the one number a query gives, 0 while Postgres is away."""
        try:
            (row,) = self.query(sql)
        except psycopg.Error:
            return 0
        return int(next(iter(row.values())))

    def leased_chunks(self) -> int:
        """Return how many chunks a living lease holds now."""
        return self.count("SELECT count(*) FROM twodoor.chunks WHERE NOT done AND lease_until > now()")

    def open_uploads(self) -> int:
        """Return how many uploads are on their way."""
        return self.count("SELECT count(*) FROM twodoor.uploads")

    def uncommitted_records(self) -> int:
        """Return how many records the two consumers have read or could read and have not committed."""
        return sum(_lag(f"http://127.0.0.1:{port}/metrics") for port in self._consumer_ports())

    def _consumer_ports(self) -> list[str]:
        return [self.stack.status()[name].address.rpartition(":")[2] for name in ("consumer", "consumer-2")]

    def _audit(self) -> None:
        """Let the database itself write down every chunk that becomes done: the product cannot hide a second time."""
        self.execute(AUDIT)

    # -- processes ------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """SIGKILL a service's process (or a model's), as it stands now."""
        os.kill(self.model_process() if name == "model process" else self.stack.pid(name), signal.SIGKILL)

    def model_process(self) -> int:
        """Return the pid of one of the processes that run a bulk model under Triton."""
        children = psutil.Process(self.stack.pid("triton")).children(recursive=True)
        for child in children:
            with suppress(psutil.Error):  # one that has just ended
                if "sentiment_model_bulk" in " ".join(child.cmdline()):
                    return child.pid
        raise AssertionError("no process of sentiment_model_bulk runs")

    def wait_ready(self, *names: str, timeout_s: float = 90.0) -> None:
        """Wait until services (all, if none is named) are ready again."""
        for name in names or tuple(self.stack.status()):
            self.stack.wait_ready(name, timeout_s)

    def rss_bytes(self) -> dict[str, int]:
        """Return the resident memory of each of our own processes."""
        return {name: psutil.Process(self.stack.pid(name)).memory_info().rss for name in DOORS}

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Return whether the condition became true in time."""
        try:
            wait_until(condition, "", timeout_s)
        except AssertionError:
            return False
        return True

    def objects(self) -> Objects:
        """Open the object store past the fault proxy."""
        return open_objects(self.store.direct())


AUDIT = """
CREATE TABLE IF NOT EXISTS public.chaos_done (
    job_id text NOT NULL, number int NOT NULL, generation bigint NOT NULL, claim text, part_key text,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE OR REPLACE FUNCTION public.chaos_note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.done THEN
        INSERT INTO public.chaos_done (job_id, number, generation, claim, part_key)
        VALUES (NEW.job_id, NEW.number, OLD.generation, OLD.token::text, NEW.part_key);
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER chaos_note AFTER UPDATE ON twodoor.chunks
    FOR EACH ROW WHEN (NEW.done) EXECUTE FUNCTION public.chaos_note();
"""


def _lag(url: str) -> int:
    try:
        text = httpx.get(url, timeout=1, trust_env=False).text
    except httpx.HTTPError:
        return 0
    found = [line for line in text.splitlines() if line.startswith("twodoor_topic_lag_records{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in found)
