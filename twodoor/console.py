"""What every command shares: exit codes, one clear line where something is wrong, and output for people or programs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NoReturn

import typer

from twodoor.config import ClientConfig


class Exit(IntEnum):
    """Exit codes of the ``twodoor`` command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_REACHABLE = 3


def fail(message: str, code: Exit = Exit.FAILED) -> NoReturn:
    """Say what is wrong in one line on stderr and leave."""
    complain(message)
    raise typer.Exit(code)


def complain(message: str) -> None:
    """Say what is wrong in one line on stderr, and go on."""
    typer.echo(f"twodoor: {plain(message)}", err=True)


def read_config() -> ClientConfig:
    """Read the environment; a value that cannot be one is wrong usage."""
    try:
        return ClientConfig.from_environ()
    except ValueError as exc:
        fail(str(exc), Exit.USAGE)


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wrap the imports of a command that needs more than the light client; names the extra where one is missing."""
    try:
        yield
    except ModuleNotFoundError as exc:
        fail(
            f"this command needs the extra `{extra}` (no module {exc.name}): in the project's folder, pip install '.[{extra}]'",
            Exit.USAGE,
        )


def say_json(value: Any) -> None:
    """Print one line of JSON, ASCII only, so that no reader finds a line end inside it."""
    typer.echo(json.dumps(value))


def plain(text: str) -> str:
    """Return text that is safe to print: no control characters of somebody's record reach the terminal."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def shorten(text: str, width: int) -> str:
    """Return printable text of at most ``width`` characters."""
    shown = plain(text[: width + 1])
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"
