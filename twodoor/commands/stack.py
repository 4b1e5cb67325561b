"""`twodoor up|down|status|logs`: the real parts on this machine, through local_stack."""

from collections import deque
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from twodoor.console import Exit, fail, needs, say_json


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when all is ready; stop with `down`.")] = False,
    consumers: Annotated[int | None, typer.Option(min=0, max=16, help="How many consumers to start.")] = None,
) -> None:
    """Start PostgreSQL, Kafka, Triton, the gateway and the consumer, and keep them running."""
    with needs("server,local"):
        import local_stack
    raise typer.Exit(local_stack.up(detach, consumers))


def down() -> None:
    """Stop the stack in order."""
    with needs("server,local"):
        import local_stack
    raise typer.Exit(local_stack.down())


def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show each part of the stack; exits 3 where one is not ready."""
    with needs("server,local"):
        import local_stack
    try:
        found = local_stack.status()
    except local_stack.ConfigError as exc:
        fail(str(exc), Exit.USAGE)
    services: list[dict[str, Any]] = found["services"]
    if as_json:
        say_json(found)
    else:
        _show(services)
    if not services or any(service["state"] != "ready" for service in services):
        raise typer.Exit(Exit.NOT_REACHABLE)


def logs(
    name: Annotated[str, typer.Argument(help="Name of a part, as `status` shows it.")],
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the part writes, until Ctrl-C.")] = False,
) -> None:
    """Print the end of a part's log."""
    with needs("server,local"):
        import local_stack
    try:
        path = local_stack.log_path(name)
    except local_stack.ConfigError as exc:
        fail(str(exc), Exit.USAGE)
    with path.open(encoding="utf-8", errors="replace") as log:
        for line in deque(log, maxlen=lines):
            typer.echo(line, nl=False)
        if follow:
            _follow(log, path)


def _follow(log: TextIO, path: Path) -> None:
    import time

    try:
        while True:
            line = log.readline()
            if line:
                typer.echo(line, nl=False)
            elif path.stat().st_size < log.tell():  # the supervisor has emptied it, see local_stack.logs
                log.seek(0)
            else:
                time.sleep(0.2)
    except KeyboardInterrupt:
        return


def _show(services: list[dict[str, Any]]) -> None:
    if not services:
        typer.echo("nothing is running")
        return
    for service in services:
        pid = service.get("pid") or "-"
        typer.echo(f"{service['name']:<12} {service['state']:<10} pid {pid!s:<8} {service.get('address') or ''}")
