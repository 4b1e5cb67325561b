"""`twodoor jobs list|show|cancel|delete|results`: what becomes of jobs."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twodoor.asking import asking, bar, exit_code, fields, job_json, job_line, watch
from twodoor.console import Exit, complain, fail, say_json

if TYPE_CHECKING:
    from twodoor.client import Client

app = typer.Typer(help="Jobs: bulk work that was handed over, and its results.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Status(StrEnum):
    """The states a job can be in."""

    queued = "queued"
    running = "running"
    cancelling = "cancelling"
    completed = "completed"
    failed = "failed"
    cancelled = "cancelled"
    expired = "expired"


@app.command("list")
def list_jobs(
    status: Annotated[Status | None, typer.Option(help="Only those in this state.")] = None,
    most: Annotated[int, typer.Option("--max", min=1, help="At most so many, the newest.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print each job as one line of JSON.")] = False,
) -> None:
    """Show jobs, newest first."""
    shown = 0
    with asking() as client:
        for job in client.list_jobs(status=status and status.value, page_rows=min(most, 100)):
            say_json(job_json(job)) if as_json else typer.echo(job_line(job))
            shown += 1
            if shown == most:
                break
    if not shown and not as_json:
        typer.echo("no jobs")


@app.command("show")
def show(
    job_id: JobId,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Stay until the job has ended.")] = False,
    timeout_s: Annotated[float | None, typer.Option("--timeout-s", min=0.1, help="Longest wait.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show one job; with --wait exits 1 where it did not complete."""
    with asking() as client:
        job = client.get_job(job_id)
        if wait:
            job = watch(client, job, timeout_s)
    if as_json:
        say_json(job_json(job))
    else:
        for line in fields(job_json(job)):
            typer.echo(line)
    if wait:
        raise typer.Exit(exit_code(job))


@app.command("cancel")
def cancel(job_id: JobId, as_json: AsJson = False) -> None:
    """Cancel a job: rows that are done keep their results, the others get `job_cancelled`. Not an error for an ended one."""
    with asking() as client:
        job = client.cancel_job(job_id)
    say_json(job_json(job)) if as_json else typer.echo(job_line(job))


@app.command("delete")
def delete(job_id: JobId, as_json: AsJson = False) -> None:
    """Delete a job that has ended, with its results."""
    with asking() as client:
        client.delete_job(job_id)
    if as_json:
        say_json({"id": job_id, "deleted": True})


@app.command("results")
def results(
    job_id: JobId,
    only_errors: Annotated[bool, typer.Option("--only-errors", help="Only rows without an answer.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="What is finished of a job that still runs.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a file; one cut off before is taken up again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --output: print what was written as JSON.")] = False,
) -> None:
    """Print a job's results as JSON lines in row order, or write them to a file."""
    from twodoor.errors import Conflict

    with asking() as client:
        try:
            if output is None:
                _print(client, job_id, only_errors, partial)
                return
            size_bytes = save(client, job_id, output, only_errors=only_errors, partial=partial)
        except Conflict:
            fail(
                f"{job_id} has not ended; --partial gives what is finished, `jobs show {job_id} --wait` waits for the end"
            )
    if as_json:
        say_json({"id": job_id, "output": str(output), "bytes": size_bytes})
    else:
        typer.echo(f"wrote {size_bytes:,} bytes to {output}")


def save(client: "Client", job_id: str, output: Path, *, only_errors: bool = False, partial: bool = False) -> int:
    """Write results to a file with a progress bar; returns the bytes. A file that cannot be written ends the command."""
    try:
        with bar(what="results") as progress:
            task = progress.add_task("results", total=None, shown="")

            def show_bytes(at: int, total: int | None) -> None:
                progress.update(task, completed=at, total=total, shown=f"{at / 1e6:,.1f} MB")

            return client.download_results(
                job_id, output, only_errors=only_errors, partial=partial, on_progress=show_bytes
            )
    except OSError as exc:
        fail(f"writing {output} failed: {exc.strerror or exc}")
    except KeyboardInterrupt:
        fail(f"stopped; what came is kept. Go on with: twodoor jobs results {job_id} --output {output}")


def _print(client: "Client", job_id: str, only_errors: bool, partial: bool) -> None:
    try:
        for row in client.results(job_id, only_errors=only_errors, partial=partial):
            # Made anew, ASCII only: no character of somebody's row reaches a terminal as it is.
            sys.stdout.write(json.dumps(row.raw) + "\n")
        sys.stdout.flush()
    except KeyboardInterrupt:
        complain("stopped")
        raise typer.Exit(Exit.FAILED) from None
