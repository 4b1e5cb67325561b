"""The `twodoor` command: registers the commands, each of which imports what it needs when it runs."""

import typer

from twodoor.commands import (
    bench,
    bulk,
    consume,
    demo,
    dlq,
    jobs,
    migrate,
    models,
    predict,
    produce,
    stack,
    stream,
    submit,
)

app = typer.Typer(
    name="twodoor",
    help="Two doors to one model server: calls answered in milliseconds, and bulk work through jobs and topics.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up")(stack.up)
app.command("down")(stack.down)
app.command("status")(stack.status)
app.command("logs")(stack.logs)
app.command("demo")(demo.demo)
app.command("migrate")(migrate.migrate)
app.command("predict")(predict.predict)
app.command("stream")(stream.stream)
app.command("submit")(submit.submit)
app.add_typer(jobs.app, name="jobs")
app.add_typer(bulk.app, name="bulk")
app.add_typer(models.app, name="models")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.add_typer(dlq.app, name="dlq")
app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.bench)


def main() -> None:
    """Run the command line; exit codes: 0 done, 1 failed, 2 wrong usage, 3 service not reachable."""
    app()
