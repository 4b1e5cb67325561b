"""Records of the topics: a value becomes a request, a finished request becomes a value, in JSON and in protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from google.protobuf.message import DecodeError

from batch_consumer.rows import Outcome
from serving.codec import decode_json, encode_json
from serving.errors import InvalidRow, InvalidUnicode, ResultTooLarge, RowError, RowTooLarge
from serving.postprocess import Classification
from serving.v1 import bulk_pb2

# An id or a model name is echoed in the result; without a bound the result of a fine record could not be written.
MAX_NAME_CHARS = 1_024

Headers = Sequence[tuple[str, bytes | None]]


class Form(Enum):
    """How a record's value is written; the value is its content type."""

    JSON = "application/json"
    PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a record stands in its topic."""

    topic: str
    partition: int
    offset: int

    @property
    def default_id(self) -> str:
        """The id of a record that has none."""
        return f"{self.topic}-{self.partition}-{self.offset}"


@dataclass(frozen=True, slots=True)
class Request:
    """A readable record. ``error`` is set where the record as a whole is wrong; then it has no texts."""

    id: str
    model: str
    texts: tuple[object, ...]
    many: bool
    truncate: bool
    form: Form
    error: RowError | None = None


def header(headers: Headers, name: str) -> str | None:
    """Return the last value of a header, or None; bytes that are not UTF-8 are replaced."""
    for key, value in reversed(headers):
        if key.lower() == name and value is not None:
            return value.decode(errors="replace")
    return None


def parse(value: bytes, headers: Headers, source: Source, max_rows: int) -> Request:
    """Read one record's value.

    Raises InvalidJson, InvalidUnicode or InvalidRow where it cannot be read at all: that record is a dead letter.
    A record that can be read but is no request comes back with its error.
    """
    content_type = (header(headers, "content-type") or Form.JSON.value).partition(";")[0].strip().lower()
    if content_type == Form.JSON.value:
        return _from_json(value, source, max_rows)
    if content_type == Form.PROTOBUF.value:
        return _from_protobuf(value, source, max_rows)
    raise InvalidRow(f"content-type {content_type[:100]!r} is neither {Form.JSON.value} nor {Form.PROTOBUF.value}")


def _from_json(value: bytes, source: Source, max_rows: int) -> Request:
    body = decode_json(value)
    if not isinstance(body, dict):
        return _refused(source.default_id, "", InvalidRow("the record is no JSON object"), Form.JSON)
    record_id, error = _name(body, "id", source.default_id)
    if error is not None:
        return _refused(source.default_id, _printable(body.get("model")), error, Form.JSON)
    model, error = _name(body, "model", None)
    if error is not None:
        return _refused(record_id, _printable(body.get("model")), error, Form.JSON)
    many = "inputs" in body
    error = _shape(body, many)
    if error is None:
        texts = tuple(body["inputs"]) if many else (body["text"],)
        error = _count(texts, many, max_rows)
    if error is not None:
        return _refused(record_id, model, error, Form.JSON)
    return Request(record_id, model, texts, many, body.get("truncate") is True, Form.JSON)


def _shape(body: Mapping[str, Any], many: bool) -> RowError | None:
    if many and "text" in body:
        return InvalidRow("the record has both text and inputs")
    if not many and "text" not in body:
        return InvalidRow("the record has neither text nor inputs")
    if many and not isinstance(body["inputs"], list):
        return InvalidRow("inputs is no array")
    if not many and not isinstance(body["text"], str):
        return InvalidRow("text is no string")
    if not isinstance(body.get("truncate", False), bool | None):
        return InvalidRow("truncate is neither true nor false")
    return None


def _name(body: Mapping[str, Any], field: str, default: str | None) -> tuple[str, RowError | None]:
    """Return the field's text; a missing id is fine, a missing model is not."""
    name = body.get(field, default)
    if name is None and default is not None:
        return default, None
    if not isinstance(name, str):
        return "", InvalidRow(f"{field} is missing" if name is None else f"{field} is no string")
    if len(name) > MAX_NAME_CHARS:
        return "", RowTooLarge(f"{field} has {len(name)} characters, the limit is {MAX_NAME_CHARS}")
    try:
        name.encode()
    except UnicodeEncodeError:
        return "", InvalidUnicode(f"{field} holds a lone surrogate, which is no character")
    return name, None


def _printable(name: object) -> str:
    return name[:MAX_NAME_CHARS].encode(errors="replace").decode() if isinstance(name, str) else ""


def _from_protobuf(value: bytes, source: Source, max_rows: int) -> Request:
    try:
        message = bulk_pb2.BulkRequest.FromString(value)
    except DecodeError:
        raise InvalidRow("the value is no serving.v1.BulkRequest") from None
    body = {"id": message.id or None, "model": message.model or None}
    record_id, error = _name(body, "id", source.default_id)
    if error is not None:
        return _refused(source.default_id, _printable(message.model), error, Form.PROTOBUF)
    model, error = _name(body, "model", None)
    many = not message.HasField("text")
    if error is None and message.inputs and not many:
        error = InvalidRow("the record has both text and inputs")
    if error is None and many and not message.inputs:
        error = InvalidRow("the record has neither text nor inputs")
    texts: tuple[object, ...] = tuple(message.inputs) if many else (message.text,)
    error = error or _count(texts, many, max_rows)
    if error is not None:
        return _refused(record_id, _printable(message.model), error, Form.PROTOBUF)
    return Request(record_id, model, texts, many, message.truncate, Form.PROTOBUF)


def _count(texts: Sequence[object], many: bool, max_rows: int) -> RowError | None:
    if many and not texts:
        return InvalidRow("inputs is empty")
    if len(texts) > max_rows:
        return RowTooLarge(f"inputs has {len(texts)} rows, the limit is {max_rows}")
    return None


def _refused(record_id: str, model: str, error: RowError, form: Form) -> Request:
    return Request(record_id, model, (), many=False, truncate=False, form=form, error=error)


def render(request: Request, outcomes: Sequence[Outcome], source: Source, limit_bytes: int) -> bytes:
    """Return the value of the one result of a finished request, at most ``limit_bytes`` long.

    An answer that is larger is replaced by the error result_too_large.
    """
    write = _to_json if request.form is Form.JSON else _to_protobuf
    value = write(request, outcomes, source)
    if len(value) <= limit_bytes:
        return value
    error = ResultTooLarge(f"the answer has {len(value)} bytes, the result topic takes {limit_bytes}")
    return write(_refused(request.id, request.model, error, request.form), (), source)


def _to_json(request: Request, outcomes: Sequence[Outcome], source: Source) -> bytes:
    result: dict[str, Any] = {"id": request.id, "model": request.model}
    if request.error is not None:
        result["error"] = _error_json(request.error)
    elif request.many:
        result["predictions"] = [
            {"error": _error_json(outcome)} if isinstance(outcome, RowError) else outcome.as_json()
            for outcome in outcomes
        ]
    elif isinstance(outcome := outcomes[0], RowError):
        result["error"] = _error_json(outcome)
    else:
        result["output"] = outcome.as_json()
    result["source"] = {"topic": source.topic, "partition": source.partition, "offset": source.offset}
    return encode_json(result)


def _error_json(error: RowError) -> dict[str, str]:
    return {"code": error.code, "message": str(error)}


def _to_protobuf(request: Request, outcomes: Sequence[Outcome], source: Source) -> bytes:
    result = bulk_pb2.BulkResult(
        id=request.id,
        model=request.model,
        source=bulk_pb2.Source(topic=source.topic, partition=source.partition, offset=source.offset),
    )
    if request.error is not None:
        result.error.CopyFrom(_error_message(request.error))
    elif request.many:
        result.predictions.predictions.extend(map(_prediction, outcomes))
    elif isinstance(outcome := outcomes[0], RowError):
        result.error.CopyFrom(_error_message(outcome))
    else:
        result.output.CopyFrom(_prediction(outcome))
    return result.SerializeToString()


def _error_message(error: RowError) -> bulk_pb2.Error:
    return bulk_pb2.Error(code=error.code, message=str(error))


def _prediction(outcome: Outcome) -> bulk_pb2.Prediction:
    if isinstance(outcome, RowError):
        return bulk_pb2.Prediction(error=_error_message(outcome))
    if isinstance(outcome, Classification):
        return bulk_pb2.Prediction(
            classification=bulk_pb2.Classification(
                label=outcome.label,
                score=outcome.score,
                scores=dict(outcome.scores),
                sentiment=outcome.label if outcome.sentiment else "",
            )
        )
    return bulk_pb2.Prediction(embedding=bulk_pb2.Embedding(values=outcome.values.tolist()))
