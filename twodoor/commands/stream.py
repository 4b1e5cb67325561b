"""`twodoor stream`: lines in, answers out, over one connection, each answer as soon as it is there."""

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from twodoor.asking import exits
from twodoor.console import Exit, complain, fail, say_json

if TYPE_CHECKING:
    from twodoor.stream_wire import StreamAnswer

MOST_LINE_BYTES = 2**20
_MOST_TEXT_BYTES = MOST_LINE_BYTES - 1_024  # the model's name and our own id go with it
_MOST_GROWTH = 6


def stream(
    file: Annotated[
        str,
        typer.Argument(
            metavar="[FILE]",
            help='Lines, each a text, a JSON string, or {"text", "id"?, "model"?, "truncate"?}; `-` reads stdin.',
        ),
    ] = "-",
    model: Annotated[str | None, typer.Option(help="Name of the model; default: the server's.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long for the model.")] = False,
    in_order: Annotated[bool, typer.Option("--in-order", help="Print answers in the order of the lines.")] = False,
    window: Annotated[int, typer.Option(min=1, max=1_024, help="Most lines that are unanswered at one time.")] = 32,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.001, help="Deadline of each answer.")] = 10.0,
) -> None:
    """Send each line as it is read and print its answer as a JSON line as it comes: `{"line", "id"?, "output" or "error"}`.

    A line that begins with `{` or `"` has to be JSON; any other is a text itself. Exits 1 where a line has no answer.
    """
    source = _open(file)
    options = {"model": model, "truncate": truncate, "in_order": in_order, "window": window, "timeout_s": timeout_s}
    told = _Told(in_order)
    try:
        with exits(tell_when=False):
            asyncio.run(_run(source, told, options))
    except KeyboardInterrupt:
        fail(f"stopped; {len(told.lines)} lines that were sent have no answer")
    except BrokenPipeError:
        raise  # who read our output has gone; the command line ends quietly for that
    except OSError as exc:
        fail(f"reading {file} failed: {exc.strerror or exc}")
    finally:
        source.close()
    if told.failed:
        complain(f"{told.failed:,} lines have no answer")
        raise typer.Exit(Exit.FAILED)


async def _run(source: BinaryIO, told: "_Told", options: dict[str, Any]) -> None:
    from twodoor.client import AsyncClient

    async with AsyncClient() as client:
        async for answer in client.stream(_items(source, told), **options):
            told.answer(answer)
    told.end()


async def _items(source: BinaryIO, told: "_Told") -> AsyncIterator[dict[str, Any]]:
    """Yield what the lines hold; a line that holds no text is told with its number, and nothing is sent for it."""
    from twodoor.lines import BadLine, read_lines

    index = 0
    async for number, line, _ in read_lines(source, MOST_LINE_BYTES):
        if line is not None and not line.strip():
            continue
        try:
            item = _parse(line)
        except BadLine as exc:
            told.bad(number, index, str(exc))
            continue
        told.lines[index] = number
        index += 1
        yield item


def _parse(line: bytes | None) -> dict[str, Any]:
    from twodoor.lines import BadLine
    from twodoor.stream_wire import encode_message

    if line is None:
        raise BadLine(f"larger than {MOST_LINE_BYTES} bytes")
    try:
        text = line.decode()
        value = json.loads(text) if text.lstrip()[:1] in ("{", '"') else text
    except UnicodeDecodeError as exc:
        raise BadLine(f"not UTF-8 at byte {exc.start}") from None
    except (ValueError, RecursionError) as exc:
        raise BadLine(f"not JSON: {exc}") from None
    item = {"text": value} if isinstance(value, str) else value
    kinds = {"text": str, "id": str, "model": str, "truncate": bool}
    for name, member in item.items():
        if name not in kinds:
            raise BadLine(f"unknown field {name!r}")
        if not isinstance(member, kinds[name]):
            raise BadLine(f"{name} is not a {'boolean' if kinds[name] is bool else 'string'}")
    if "text" not in item:
        raise BadLine("text is missing")
    # What is escaped in JSON grows, and a message over the server's limit would end the stream for all lines.
    if len(line) > _MOST_TEXT_BYTES // _MOST_GROWTH and len(encode_message(item).encode()) > _MOST_TEXT_BYTES:
        raise BadLine(f"larger than {_MOST_TEXT_BYTES} bytes as JSON")
    return dict(item)


class _Told:
    """What is printed, and what is still to be: ``lines`` are the line numbers of what was sent and not answered."""

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self.lines: dict[int, int] = {}
        self.failed = 0
        self._answered = 0
        self._bad: deque[tuple[int, dict[str, Any]]] = deque()

    def answer(self, answer: "StreamAnswer") -> None:
        """Print an answer under its line's number."""
        self._bad_before(self._answered)
        shown: dict[str, Any] = {"line": self.lines.pop(answer.index)}
        if answer.id is not None:
            shown["id"] = answer.id
        shown |= {name: answer.raw[name] for name in ("output", "error") if name in answer.raw}
        self.failed += "error" in shown
        self._answered += 1
        say_json(shown)

    def bad(self, number: int, index: int, why: str) -> None:
        """Tell of a line that holds no text; ``index`` is how many texts came before it."""
        self.failed += 1
        self._bad.append((index, {"line": number, "error": {"code": "invalid_row", "message": why}}))
        if self._in_order:
            self._bad_before(self._answered)
        else:
            self.end()

    def end(self) -> None:
        """Print what is left."""
        while self._bad:
            say_json(self._bad.popleft()[1])

    def _bad_before(self, answered: int) -> None:
        while self._bad and self._bad[0][0] <= answered:
            say_json(self._bad.popleft()[1])


def _open(file: str) -> BinaryIO:
    """Open without a buffer: closing a buffered one waits for what a terminal or a pipe has not sent yet."""
    if file == "-":
        return os.fdopen(os.dup(0), "rb", buffering=0)
    try:
        return Path(file).open("rb", buffering=0)
    except OSError as exc:
        fail(f"cannot read {file}: {exc.strerror}", Exit.USAGE)
