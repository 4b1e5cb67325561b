"""The forms a job may be asked for in, and what is wrong with one that has none of them. Pure: no I/O."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.errors import EmptyInput, InvalidJob
from serving.settings import JobsSettings

BODY_FIELDS = (
    "model", "inputs", "input_object", "truncate", "metadata", "completion_window_s", "result_ttl_s",
)  # fmt: skip
QUERY_FIELDS = ("model", "truncate", "metadata", "completion_window_s", "result_ttl_s")
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_MODEL_CHARS = 256
MAX_KEY_CHARS = 255
MAX_NAME_BYTES = 900
"""Of an imported object's whole key: S3 takes 1,024 with the bucket's prefix."""
MAX_SEGMENT_BYTES = 255
_SHOWN_CHARS = 64
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_STAGED = re.compile(r"#\d+$")  # obstore's names for files that are not complete


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job that was asked for in a right form: options as given, None where the settings decide.

    The rows are ``inputs`` (not yet checked one by one: a bad one is that row's error), or in the object
    ``input_object``, or, where both are None, in the JSONL body that comes with the request.
    """

    model: str
    truncate: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    completion_window_s: int | None = None
    result_ttl_s: int | None = None
    inputs: Sequence[Any] | None = None
    input_object: str | None = None


def parse_body(value: Any, settings: JobsSettings) -> JobRequest:
    """Return the request of a decoded JSON body or topic record; raises InvalidJob, or EmptyInput for no rows."""
    if not isinstance(value, dict):
        raise InvalidJob(f"the body is {_kind(value)}, expected an object", field="body")
    _check_names(value, BODY_FIELDS)
    inputs, input_object = value.get("inputs"), value.get("input_object")
    if ("inputs" in value) == ("input_object" in value):
        raise InvalidJob("send either inputs or input_object", field="inputs")
    if "inputs" in value:
        if not isinstance(inputs, list):
            raise InvalidJob(f"inputs is {_kind(inputs)}, expected an array", field="inputs")
        if not inputs:
            raise EmptyInput("inputs is an empty array, expected at least one row")
    elif not isinstance(input_object, str):
        raise InvalidJob(f"input_object is {_kind(input_object)}, expected a string", field="input_object")
    return JobRequest(**_options(value, settings), inputs=inputs, input_object=input_object)


def parse_query(pairs: Iterable[tuple[str, str]], settings: JobsSettings) -> JobRequest:
    """Return the request of a JSONL body's query parameters (decoded, in order); raises InvalidJob.

    ``metadata`` is a JSON object; ``truncate`` is ``true`` or ``false`` (also ``1``, ``0``, or nothing after the name).
    """
    given: dict[str, Any] = {}
    for name, text in pairs:
        _check_names([name], QUERY_FIELDS)
        if name in given:
            raise InvalidJob(f"{name} is given more than once", field=name)
        given[name] = _READ.get(name, _as_it_is)(name, text)
    return JobRequest(**_options(given, settings))


def import_key(tenant: str, name: str) -> str:
    """Return the object key of a tenant's imported object; raises InvalidJob for any name that could mean another place.

    Stores and tools differ in what they make of ``..``, empty segments, backslashes and percent signs: such names are
    refused, not cleaned.
    """
    prefix = f"imports/{tenant}/"
    wrong = _wrong_name(prefix, name)
    if wrong is not None or "/" in tenant:
        raise InvalidJob(wrong or "this tenant has no imports", field="input_object")
    return name


def check_idempotency_key(key: str) -> None:
    """Raise InvalidJob unless the key is 1 to 255 characters without control characters."""
    if not 1 <= len(key) <= MAX_KEY_CHARS or _CONTROL.search(key) or _SURROGATE.search(key):
        raise InvalidJob(
            f"Idempotency-Key has 1 to {MAX_KEY_CHARS} characters, none of them a control character",
            field="Idempotency-Key",
            limit=MAX_KEY_CHARS,
        )


def _options(value: Mapping[str, Any], settings: JobsSettings) -> dict[str, Any]:
    truncate = value.get("truncate", False)
    if not isinstance(truncate, bool):
        raise InvalidJob(f"truncate is {_kind(truncate)}, expected true or false", field="truncate")
    return {
        "model": _model(value.get("model")),
        "truncate": truncate,
        "metadata": _metadata(value.get("metadata", {})),
        "completion_window_s": _seconds(value, "completion_window_s", settings.max_completion_window_s),
        "result_ttl_s": _seconds(value, "result_ttl_s", settings.max_result_ttl_s),
    }


def _check_names(names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InvalidJob(f"the fields are {', '.join(known)}", field=_shown(name))


def _model(value: Any) -> str:
    if value is None:
        raise InvalidJob("model is missing: name the model that is to run", field="model")
    if not isinstance(value, str):
        raise InvalidJob(f"model is {_kind(value)}, expected a string", field="model")
    if not 1 <= len(value) <= MAX_MODEL_CHARS or _CONTROL.search(value) or _SURROGATE.search(value):
        raise InvalidJob(f"model is a name of 1 to {MAX_MODEL_CHARS} characters", field="model", limit=MAX_MODEL_CHARS)
    return value


def _seconds(value: Mapping[str, Any], name: str, most: int) -> int | None:
    seconds = value.get(name)
    if seconds is None and name not in value:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int):
        raise InvalidJob(f"{name} is {_kind(seconds)}, expected whole seconds", field=name)
    if not 1 <= seconds <= most:
        raise InvalidJob(f"{name} is from 1 to {most} seconds", field=name, limit=most)
    return seconds


def _metadata(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise InvalidJob(f"metadata is {_kind(value)}, expected an object", field="metadata")
    if len(value) > MAX_METADATA_PAIRS:
        raise _too_much(f"{len(value)} pairs", MAX_METADATA_PAIRS)
    for key, text in value.items():
        if not isinstance(text, str):
            raise InvalidJob(f"a value of metadata is {_kind(text)}, expected a string", field="metadata")
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise _too_much(f"a key of {len(key)} characters", MAX_METADATA_KEY_CHARS)
        if len(text) > MAX_METADATA_VALUE_CHARS:
            raise _too_much(f"a value of {len(text)} characters", MAX_METADATA_VALUE_CHARS)
        if "\0" in key or "\0" in text:
            raise InvalidJob("metadata holds a NUL character", field="metadata")
        if _SURROGATE.search(key) or _SURROGATE.search(text):
            raise InvalidJob("metadata holds a lone surrogate, which is no character", field="metadata")
    return value


def _too_much(what: str, limit: int) -> InvalidJob:
    return InvalidJob(f"metadata has {what}, the limit is {limit}", field="metadata", limit=limit)


def _wrong_name(prefix: str, name: str) -> str | None:
    segments = name.split("/")
    if not name.startswith(prefix) or any(segment in ("", ".", "..") for segment in segments):
        return f"expected a name under {prefix} without empty or dotted segments"
    if _CONTROL.search(name) or _SURROGATE.search(name) or any(mark in name for mark in "\\%"):
        return "the name holds a control character, a backslash or a percent sign"
    if len(name.encode()) > MAX_NAME_BYTES or any(len(segment.encode()) > MAX_SEGMENT_BYTES for segment in segments):
        return f"the name is longer than {MAX_NAME_BYTES} bytes, or a segment of it than {MAX_SEGMENT_BYTES}"
    if any(_STAGED.search(segment) for segment in segments):
        return "the name ends like an incomplete upload (# and digits)"
    return None


def _as_it_is(name: str, text: str) -> Any:
    return text


def _flag(name: str, text: str) -> bool:
    flags = {"true": True, "1": True, "": True, "false": False, "0": False}
    if text.lower() not in flags:
        raise InvalidJob(f"{name} is neither true nor false", field=name)
    return flags[text.lower()]


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise InvalidJob(f"{name} is not a number of whole seconds", field=name)
    return int(text)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidJob(f"{name} is not JSON", field=name) from None


_READ = {"truncate": _flag, "completion_window_s": _whole, "result_ttl_s": _whole, "metadata": _json}


def _kind(value: object) -> str:
    """Return what JSON calls a value."""
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "a boolean"), ((int, float), "a number"), (str, "a string"), (list, "an array"), (dict, "an object"),
    )  # fmt: skip
    return next((name for cls, name in kinds if isinstance(value, cls)), "null")


def _shown(name: str) -> str:
    """Return a caller's own word so short and clean that it may stand in an answer."""
    return _SURROGATE.sub("?", _CONTROL.sub("?", name[:_SHOWN_CHARS]))
