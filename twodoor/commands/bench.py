"""`twodoor bench`: run the repository's benchmarks against the stack; everything after it goes to them."""

import subprocess
import sys
from pathlib import Path

import typer

from twodoor.console import Exit, fail


def bench(context: typer.Context) -> None:
    """Run the benchmark report (of a checkout of the repository); arguments go on to `python -m benchmarks`."""
    places = (Path.cwd(), Path(__file__).resolve().parents[2])
    root = next((place for place in places if (place / "benchmarks" / "__main__.py").is_file()), None)
    if root is None:
        fail("the benchmarks are not part of the package: run `make bench` in a checkout of the repository", Exit.USAGE)
    done = subprocess.run([sys.executable, "-m", "benchmarks", *context.args], cwd=root, check=False)
    raise typer.Exit(done.returncode)
