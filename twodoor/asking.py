"""What the commands share that ask a server: one client, errors as exit codes, a job in a line, and progress bars on stderr."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from twodoor.console import Exit, complain, fail, plain, shorten

if TYPE_CHECKING:
    from rich.progress import Progress

    from twodoor.client import Client
    from twodoor.job_records import Job


@contextmanager
def asking(**options: Any) -> Iterator["Client"]:
    """Open a client; what goes wrong with a call ends the command as `exits` says."""
    from twodoor.client import Client

    with exits(), Client(**options) as client:
        yield client


@contextmanager
def exits(*, tell_when: bool = True) -> Iterator[None]:
    """Let what goes wrong with a call end the command with one line and the exit code that names it.

    ``tell_when``: the line says when to try again, where the server did.
    """
    from twodoor.errors import NotReachable, TwodoorError

    try:
        yield
    except NotReachable as exc:
        fail(f"{exc}; is the stack up? (twodoor up)", Exit.NOT_REACHABLE)
    except TwodoorError as exc:
        later = f"; try again in {exc.retry_after_s:g} s" if tell_when and exc.retry_after_s else ""
        fail(f"{exc.code}: {exc}{later}")
    except ValueError as exc:
        fail(str(exc), Exit.USAGE)


def job_json(job: "Job") -> dict[str, Any]:
    """Return the job as the server gave it."""
    return dict(job.raw)


def job_line(job: "Job") -> str:
    """Return the job in one line for a person."""
    rows = job.rows
    done = f"{rows.total - rows.pending:,} of {rows.total:,} rows"
    failed = f", {rows.failed:,} failed" if rows.failed else ""
    return plain(f"{job.id}  {job.status:<10} {job.created_at:%Y-%m-%d %H:%M:%S}  {job.model:<24} {done}{failed}")


def ended_line(job: "Job") -> str:
    """Return in one line how a job ended."""
    rows = job.rows
    took_s = _seconds(job.started_at or job.created_at, job.finished_at)
    speed = f" in {took_s:.1f} s, {rows.total / took_s:,.0f} rows/s" if took_s else ""
    why = f": {job.error.code}: {job.error.message}" if job.error else ""
    return plain(
        f"{job.id} {job.status}: {rows.total:,} rows, {rows.succeeded:,} succeeded, {rows.failed:,} failed{speed}{why}"
    )


def exit_code(job: "Job") -> Exit:
    """Return 0 for a completed job, also where rows of it failed: these are told in its results."""
    return Exit.DONE if job.status == "completed" else Exit.FAILED


def fields(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield one printable line for each member of a job, those of an inner object behind its name."""
    for name, member in value.items():
        if isinstance(member, dict):
            inner = ", ".join(f"{key} {shown}" for key, shown in member.items())
            yield f"{plain(name):<14} {shorten(inner, 400) or '-'}"
        else:
            yield f"{plain(name):<14} {'-' if member is None else shorten(str(member), 400)}"


def bar(*, what: str) -> "Progress":
    """Return a progress bar on stderr; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    screen = Console(stderr=True)
    columns = (
        TextColumn(what), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[shown]}", markup=False),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True)


def watch(client: "Client", job: "Job", timeout_s: float | None, told: str = "") -> "Job":
    """Wait for a job's end with a progress bar (rows/s, time left); ``told`` is said first.

    Ctrl-C leaves the job running and says how to come back.
    """
    from twodoor.errors import TwodoorError

    began_at, began_rows = time.monotonic(), job.rows.total - job.rows.pending
    try:
        if told:
            complain(told)
        with bar(what="rows") as progress:
            task = progress.add_task("rows", total=job.rows.total, completed=began_rows, shown=job.status)
            for now in client.watch_job(job.id, timeout_s=timeout_s):
                job = now
                done = job.rows.total - job.rows.pending
                speed = (done - began_rows) / max(time.monotonic() - began_at, 1e-3)
                progress.update(task, completed=done, total=job.rows.total, shown=_shown(job, done, speed))
    except KeyboardInterrupt:
        fail(f"stopped waiting; the job goes on. {come_back(job.id)}")
    except TwodoorError:
        complain(f"the job is in the server's hands. {come_back(job.id)}")
        raise
    return job


def come_back(job_id: str) -> str:
    """Return what to type to see more of a job."""
    return f"See: twodoor jobs show {job_id} --wait; its results: twodoor jobs results {job_id}"


def _shown(job: "Job", done: int, speed: float) -> str:
    failed = f", {job.rows.failed:,} failed" if job.rows.failed else ""
    return plain(f"{done:,} of {job.rows.total:,}{failed}, {speed:,.0f} rows/s, {job.status}")


def _seconds(start: datetime, end: datetime | None) -> float:
    return (end - start).total_seconds() if end else 0.0
