"""`twodoor bulk pause|resume|status`: the operator's hand on bulk work, topics and jobs alike."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from twodoor.asking import asking
from twodoor.console import plain, say_json

if TYPE_CHECKING:
    from twodoor.job_records import BulkState

app = typer.Typer(help="Pause bulk work and let it go on; callers are not affected.", no_args_is_help=True)

Wait = Annotated[bool, typer.Option("--wait", "-w", help="Return when it is so; exits 1 where it is not in time.")]
TimeoutS = Annotated[float, typer.Option("--timeout-s", min=0.1, help="Longest wait of --wait.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("pause")
def pause(wait: Wait = False, timeout_s: TimeoutS = 60.0, as_json: AsJson = False) -> None:
    """Pause: consumers finish what they have in flight and take nothing new. `paused` once no row is in flight."""
    with asking() as client:
        _show(client.pause_bulk(wait_s=timeout_s if wait else None), as_json)


@app.command("resume")
def resume(wait: Wait = False, timeout_s: TimeoutS = 60.0, as_json: AsJson = False) -> None:
    """Let bulk work go on; not an error where it is not paused."""
    with asking() as client:
        _show(client.resume_bulk(wait_s=timeout_s if wait else None), as_json)


@app.command("status")
def status(
    wait: Annotated[bool, typer.Option("--wait", "-w", help="While it is pausing, wait until it is paused.")] = False,
    timeout_s: TimeoutS = 60.0,
    as_json: AsJson = False,
) -> None:
    """Show whether bulk work goes on, and what each consumer does."""
    with asking() as client:
        _show(client.bulk_state(wait_s=timeout_s if wait else None), as_json)


def _show(state: "BulkState", as_json: bool) -> None:
    consumers: list[dict[str, Any]] = [dict(one) for one in state.consumers]
    if as_json:
        say_json({"state": state.state, "consumers": consumers})
        return
    typer.echo(plain(state.state))
    for one in consumers:
        typer.echo(plain("  " + ", ".join(f"{name} {value}" for name, value in one.items())))
    if not consumers:
        typer.echo("  no consumer is alive")
