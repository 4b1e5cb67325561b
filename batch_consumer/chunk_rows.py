"""The bytes of a chunk become rows: split at newlines only, then strict UTF-8 and JSON row by row. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batch_consumer.records import MAX_NAME_CHARS
from jobs.records import ChunkPlan
from serving.codec import decode_json
from serving.errors import InputLost, InvalidRow, InvalidUnicode, RowError, RowTooLarge

BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r"
_MISSING = object()


@dataclass(slots=True)
class ChunkRow:
    """One row as it was sent. ``line`` counts physical lines from 1 where its job has lines; a row with an error has no text."""

    text: object = None
    id: str | None = None
    line: int | None = None
    error: RowError | None = None


def parse_rows(data: bytes, plan: ChunkPlan, has_lines: bool) -> list[ChunkRow]:
    """Return the chunk's rows in order, exactly ``plan.row_count``.

    Raises InputLost where the bytes hold another number of rows: the object is not the one that was accepted.
    """
    rows = [_parse(line, number if has_lines else None) for number, line in _lines(data, plan)]
    if len(rows) != plan.row_count:
        raise InputLost("the job's input is no longer what was accepted")
    return rows


def rows_unread(plan: ChunkPlan, has_lines: bool) -> list[ChunkRow]:
    """Return the rows of a chunk whose bytes are not read: without ids, and with a line only where there is but one."""
    line = plan.first_line if has_lines and plan.oversized else None
    return [ChunkRow(line=line) for _ in range(plan.row_count)]


def rows_too_large(plan: ChunkPlan, has_lines: bool) -> list[ChunkRow]:
    """Return the one row of an oversized chunk, which is never read."""
    rows = rows_unread(plan, has_lines)
    for row in rows:
        row.error = RowTooLarge(f"the row has {plan.end_byte - plan.start_byte} bytes, more than a row may have")
    return rows


def _lines(data: bytes, plan: ChunkPlan) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, row) for each line that is not blank."""
    if plan.start_byte == 0 and data.startswith(BOM):
        data = data[len(BOM) :]
    for number, line in enumerate(data.split(b"\n"), plan.first_line):
        row = line.removesuffix(b"\r")
        if row.strip(_BLANKS):
            yield number, row


def _parse(line: bytes, number: int | None) -> ChunkRow:
    try:
        value = decode_json(line)
    except RowError as error:
        return ChunkRow(line=number, error=error)
    if isinstance(value, str):
        return ChunkRow(value, line=number)
    if not isinstance(value, dict):
        return ChunkRow(line=number, error=InvalidRow("the row is neither a string nor an object with text"))
    return _from_object(value, number)


def _from_object(value: dict[str, Any], number: int | None) -> ChunkRow:
    row = ChunkRow(line=number)
    name = value.get("id")
    if name is not None:
        row.error = _wrong_id(name)
        if row.error is not None:
            return row
        row.id = name
    text = value.get("text", _MISSING)
    if text is _MISSING:
        row.error = InvalidRow("text is missing")
    elif not isinstance(text, str):
        row.error = InvalidRow("text is no string")
    else:
        row.text = text
    return row


def _wrong_id(name: object) -> RowError | None:
    if not isinstance(name, str):
        return InvalidRow("id is no string")
    if len(name) > MAX_NAME_CHARS:
        return RowTooLarge(f"id has {len(name)} characters, the limit is {MAX_NAME_CHARS}")
    try:
        name.encode()
    except UnicodeEncodeError:
        return InvalidUnicode("id holds a lone surrogate, which is no character")
    return None
