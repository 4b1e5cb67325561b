"""`twodoor migrate`: bring the jobs' database to the version this release needs."""

import asyncio
import os
from typing import Annotated

import typer

from twodoor.console import Exit, fail, needs, say_json

URL_VARIABLE = "TWODOOR_JOBS_DATABASE_URL"


def migrate(
    as_json: Annotated[bool, typer.Option("--json", help="Print what was applied, and the version, as JSON.")] = False,
) -> None:
    """Apply the migrations that are due to the database of TWODOOR_JOBS_DATABASE_URL, all of them or none.

    Several at once are fine: one does it and the others find it done. `twodoor up` does this by itself to the
    PostgreSQL it starts; a database of your own needs this command first, and again after an upgrade.
    """
    url = os.environ.get(URL_VARIABLE, "")
    if not url:
        fail(f"{URL_VARIABLE} is not set: the postgresql:// URL of the jobs' database", Exit.USAGE)
    with needs("server"):
        import psycopg  # noqa: F401

        from jobs import migrations
    try:
        done = asyncio.run(migrations.migrate(url))
    except migrations.ConfigError as exc:
        fail(str(exc))
    except migrations.DependencyDown as exc:
        fail(str(exc), Exit.NOT_REACHABLE)
    if as_json:
        say_json({"version": done.version, "applied": list(done.applied)})
    else:
        typer.echo(done.summary)
