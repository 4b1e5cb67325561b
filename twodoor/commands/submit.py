"""`twodoor submit`: hand a file of rows over as a job, and with --wait stay until it has ended."""

import os
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from twodoor.asking import asking, bar, ended_line, exit_code, job_json, watch
from twodoor.commands.jobs import save
from twodoor.console import Exit, complain, fail, say_json

if TYPE_CHECKING:
    from twodoor.client import Client
    from twodoor.job_records import Job


def submit(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.jsonl",
            help='JSON lines, each a string or {"id"?, "text"}; `-` reads stdin, .gz is sent as it is.',
        ),
    ],
    model: Annotated[str | None, typer.Option(help="Name of the model; default: TWODOOR_MODELS_DEFAULT.")] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Stay until the job has ended.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the results there at the end (waits for it).")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")] = False,
    compress: Annotated[bool, typer.Option("--gzip", help="Compress on the way.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="The same key and file again give the same job; default: a new one.")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with the job; may be given often.")
    ] = None,
    completion_window_s: Annotated[
        int | None, typer.Option(min=1, help="The job expires when it has not ended by then.")
    ] = None,
    result_ttl_s: Annotated[int | None, typer.Option(min=1, help="How long its results are kept.")] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout-s", min=0.1, help="Longest wait for the end; the job then goes on.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
) -> None:
    """Submit a job: each row gives exactly one result. Prints the job's id; with --wait, how it ended.

    Exits 1 where the job failed, expired or was cancelled, or did not end in time. Rows without an answer are told
    and do not change the exit code: `jobs results JOB --only-errors` shows them. Ctrl-C while waiting leaves the job
    running.
    """
    options = {
        "model": model, "truncate": truncate, "metadata": _metadata(metadata or []), "compress": compress,
        "completion_window_s": completion_window_s, "result_ttl_s": result_ttl_s, "idempotency_key": idempotency_key,
    }  # fmt: skip
    if output is not None:
        _check_output(output)
    with asking() as client:
        job = _submit(client, file, options)
        if not wait and output is None:
            say_json(job_json(job)) if as_json else typer.echo(job.id)
            return
        job = watch(client, job, timeout_s, f"submitted {job.id}")
        if output is not None:
            save(client, job.id, output)
    say_json(job_json(job)) if as_json else typer.echo(ended_line(job))
    if job.rows.failed and not as_json:
        complain(f"{job.rows.failed:,} rows have no answer: twodoor jobs results {job.id} --only-errors")
    raise typer.Exit(exit_code(job))


def _submit(client: "Client", file: str, options: dict[str, Any]) -> "Job":
    from twodoor.errors import ConnectionLost, DeadlineExceeded, ServerFailed

    rows = _open(file)
    # Made here, so that it can be told: only who knows it can ask again without making a second job.
    options["idempotency_key"] = key = options["idempotency_key"] or uuid.uuid4().hex
    unknown = f"the server may have taken the job; the same again with --idempotency-key {key} makes no second one"
    try:
        with nullcontext() if isinstance(rows, Path) else rows, bar(what="upload") as progress:
            task = progress.add_task("upload", total=None, shown="")

            def show(read_bytes: int, size_bytes: int | None) -> None:
                progress.update(task, completed=read_bytes, total=size_bytes, shown=f"{read_bytes / 1e6:,.1f} MB")

            return client.submit_job(rows, on_progress=show, **options)
    except OSError as exc:
        fail(f"reading {file} failed: {exc.strerror or exc}")
    except KeyboardInterrupt:
        fail(f"stopped; {unknown}")
    except (ConnectionLost, DeadlineExceeded, ServerFailed):
        complain(unknown)
        raise


def _open(file: str) -> Path | BinaryIO:
    if file == "-":
        # A copy without a buffer: closing the buffered one waits for the line that a terminal has not sent yet.
        return os.fdopen(os.dup(0), "rb", buffering=0)
    path = Path(file)
    try:
        with path.open("rb"):
            return path
    except OSError as exc:
        fail(f"cannot read {file}: {exc.strerror}", Exit.USAGE)


def _check_output(output: Path) -> None:
    """Refuse before the job is made what could not be written after its end."""
    if not output.absolute().parent.is_dir():
        fail(f"there is no folder {output.parent}", Exit.USAGE)
    if output.is_dir():
        fail(f"{output} is a folder: --output names a file", Exit.USAGE)


def _metadata(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            fail(f"--metadata {pair!r} is not KEY=VALUE", Exit.USAGE)
        found[key] = value
    return found
