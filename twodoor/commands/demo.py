"""`twodoor demo`: `/predict`, topic and job at work at the same time, over real text, on the real parts."""

from typing import Annotated

import typer

from twodoor.console import needs


def demo(
    rows: Annotated[
        int, typer.Option(min=100, max=50_000, help="Most rows of bulk work, half by topic and half as a job.")
    ] = 3_000,
    as_json: Annotated[bool, typer.Option("--json", help="Also print the figures as one line of JSON.")] = False,
) -> None:
    """Start a stack of its own, serve calls, a topic and a job at once, check that every row was answered exactly once.

    Uses free ports and a folder of its own, also beside a stack that runs, and leaves nothing behind.
    """
    with needs("server,local"):
        import aiokafka  # noqa: F401

        import local_stack  # noqa: F401
    from twodoor.demo import run

    raise typer.Exit(run.main(rows, as_json))
