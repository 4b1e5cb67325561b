"""The form of a message of the stream, and the forms of its answer. Pure: no I/O."""

from typing import Any

from gateway.forms import Call, kind_of, parse_body
from gateway.problems import Problem, printable
from serving.errors import InvalidRow, RowError, RowTooLarge, TextTooLong
from serving.models import ModelSpec
from serving.postprocess import Answer
from serving.settings import GatewaySettings

MOST_ID_CHARS = 256
_FIELDS = ("id", "text", "model", "truncate")
_SHOWN_CHARS = 64


def message_id(value: Any) -> str:
    """Return the id of a decoded message; raises Problem where there is none, so that no answer can carry it."""
    if not isinstance(value, dict):
        raise Problem(422, "invalid_request", f"the message is {kind_of(value)}, expected an object", field="message")
    if "id" not in value:
        raise Problem(422, "invalid_request", 'id is missing: send {"id": "…", "text": "…"}', field="id")
    given = value["id"]
    if not isinstance(given, str):
        raise Problem(422, "invalid_request", f"id is {kind_of(given)}, expected a string", field="id")
    if len(given) > MOST_ID_CHARS:
        detail = f"id has {len(given)} characters, the limit is {MOST_ID_CHARS}"
        raise Problem(422, "invalid_request", detail, field="id", limit=MOST_ID_CHARS)
    if printable(given) != given:
        raise Problem(422, "invalid_unicode", "id holds a lone surrogate, which is no character", field="id")
    return given


def parse_message(value: dict[str, Any]) -> Call:
    """Return the call of a message that has an id; raises Problem that names the field."""
    for name in value:
        if name not in _FIELDS:
            shown = printable(name[:_SHOWN_CHARS])
            raise Problem(422, "invalid_request", f"the fields are {', '.join(_FIELDS)}", field=shown)
    if "text" not in value:
        raise Problem(422, InvalidRow.code, 'text is missing: send {"id": "…", "text": "…"}', field="text")
    text = value["text"]
    if not isinstance(text, str):
        raise Problem(422, InvalidRow.code, f"text is {kind_of(text)}, expected a string", field="text")
    return parse_body({name: member for name, member in value.items() if name != "id"}, max_rows=1)


def answer_of(outcome: Answer | RowError, spec: ModelSpec, settings: GatewaySettings) -> dict[str, Any]:
    """Return ``output``, or ``error`` of a text that has none."""
    if not isinstance(outcome, RowError):
        return {"output": outcome.as_json()}
    error: dict[str, Any] = {"code": outcome.code, "message": printable(str(outcome)), "field": "text"}
    if isinstance(outcome, TextTooLong):
        error["limit"] = spec.max_tokens
    elif isinstance(outcome, RowTooLarge):
        error["limit"] = settings.max_text_chars
    return {"error": error}


def error_of(problem: Problem) -> dict[str, Any]:
    """Return ``error`` of a message that is answered as a whole."""
    error: dict[str, Any] = {"code": problem.code, "message": printable(problem.detail)}
    if problem.field is not None:
        error["field"] = problem.field
    if problem.limit is not None:
        error["limit"] = problem.limit
    if problem.retry_after_s is not None:
        error["retry_after_s"] = round(problem.retry_after_s, 3)
    return {"error": error}
