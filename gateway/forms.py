"""The forms a `/predict` call may have, and what is wrong with one that has none of them. Pure: no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from gateway.problems import Problem, printable
from serving.errors import InvalidRow, InvalidUnicode, UnknownModel

_FIELDS = ("text", "model", "truncate")
_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class Call:
    """A call that has a right form. ``texts`` are not yet checked one by one; ``model`` None is the default."""

    texts: tuple[str, ...]
    single: bool
    model: str | None = None
    truncate: bool = False


def parse_query(query: bytes) -> Call | None:
    """Return the call of ``?text=…``, or None where there is no query; raises Problem 422."""
    if not query:
        return None
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=16)
    except UnicodeDecodeError:
        raise Problem(422, InvalidUnicode.code, "text is not UTF-8", field="text") from None
    except ValueError:
        raise Problem(422, "invalid_request", "too many query parameters", field="query", limit=16) from None
    for name, _ in pairs:
        if name != "text":
            raise Problem(
                422, "invalid_request", "the query may hold text; the rest goes into a JSON body", field=_shown(name)
            )
    if len(pairs) != 1:
        raise _invalid("text", f"text is given {len(pairs)} times, expected once")
    return Call((pairs[0][1],), single=True)


def parse_body(value: Any, max_rows: int) -> Call:
    """Return the call of a decoded JSON body; raises Problem 422 that names the field, the row and the limit."""
    if not isinstance(value, dict):
        raise Problem(422, "invalid_request", f"the body is {kind_of(value)}, expected an object", field="body")
    for name in value:
        if name not in _FIELDS:
            raise Problem(422, "invalid_request", f"the fields are {', '.join(_FIELDS)}", field=_shown(name))
    model, truncate = _model(value), value.get("truncate", False)
    if not isinstance(truncate, bool):
        raise Problem(
            422, "invalid_request", f"truncate is {kind_of(truncate)}, expected true or false", field="truncate"
        )
    if "text" not in value:
        raise missing_text()
    text = value["text"]
    if isinstance(text, str):
        return Call((text,), single=True, model=model, truncate=truncate)
    if not isinstance(text, list):
        raise _invalid("text", f"text is {kind_of(text)}, expected a string or an array of strings")
    return Call(_rows(text, max_rows), single=False, model=model, truncate=truncate)


def missing_text() -> Problem:
    """Return the problem of a call that holds no text at all."""
    return _invalid("text", 'text is missing: send {"text": "…"} or ?text=…')


def kind_of(value: object) -> str:
    """Return what JSON calls a value."""
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "a boolean"), ((int, float), "a number"), (str, "a string"), (list, "an array"), (dict, "an object"),
    )  # fmt: skip
    return next((name for cls, name in kinds if isinstance(value, cls)), "null")


def _model(value: Mapping[str, Any]) -> str | None:
    if "model" not in value:
        return None
    model = value["model"]
    if not isinstance(model, str):
        raise Problem(422, "invalid_request", f"model is {kind_of(model)}, expected a string", field="model")
    if not model:
        raise Problem(404, UnknownModel.code, "no model has an empty name", field="model")
    return model


def _rows(texts: list[Any], max_rows: int) -> tuple[str, ...]:
    if not texts:
        raise _invalid("text", "text is an empty array, expected at least one string")
    if len(texts) > max_rows:
        raise Problem(
            422, "too_many_rows", f"text has {len(texts)} rows, the limit is {max_rows}", field="text", limit=max_rows
        )
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise Problem(
                422,
                InvalidRow.code,
                f"text[{row}] is {kind_of(text)}, expected a string",
                field=f"text[{row}]",
                row=row,
            )
    return tuple(texts)


def _invalid(field: str, detail: str) -> Problem:
    return Problem(422, InvalidRow.code, detail, field=field)


def _shown(name: str) -> str:
    """Return a caller's own word so short and clean that it may stand in an answer."""
    return printable(name[:_SHOWN_CHARS])
