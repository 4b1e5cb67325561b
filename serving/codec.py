"""JSON in and out, the same rules at both doors."""

import json
from typing import Any, NoReturn

import orjson

from serving.errors import InvalidJson, InvalidUnicode


def decode_json(body: bytes | bytearray | memoryview) -> Any:
    """Parse one JSON text; raises InvalidJson, or InvalidUnicode where the bytes are not UTF-8.

    orjson refuses an escaped lone surrogate, which JSON's grammar allows. Such a text goes on to the slower parser,
    so that it becomes an error of the row that holds it and of no other.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        return _decode_strictly(bytes(body), str(exc))


def encode_json(value: Any) -> bytes:
    """Return one line of JSON; every character beyond ASCII that could end a line is escaped.

    Readers that split on U+0085, U+2028 or U+2029 (Python's str.splitlines does) still see one object a line.
    """
    line = orjson.dumps(value)
    for raw, escaped in _LINE_ENDS:
        line = line.replace(raw, escaped)
    return line


_LINE_ENDS = (
    ("\u0085".encode(), b"\\u0085"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def _decode_strictly(body: bytes, reason: str) -> Any:
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise InvalidUnicode(f"not UTF-8 at byte {exc.start}") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise InvalidJson(f"not JSON: {reason}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
