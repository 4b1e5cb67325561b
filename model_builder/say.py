"""Where the builder's commands write: answers to standard output, progress to standard error."""

import sys


def answer(line: str) -> None:
    """Write one line of a command's answer."""
    print(line, flush=True)  # noqa: T201 - the one place that prints


def progress(line: str) -> None:
    """Write one line about work in progress."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the one place that prints
