"""What callers of the job routes may ask for in query and headers, and what is wrong with the rest. Pure: no I/O."""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.types import Scope

from gateway.envelope import header
from gateway.problems import Problem, printable
from jobs.states import SHOWN, Status
from serving.errors import UnknownJob

MOST_PER_PAGE = 100
_PER_PAGE = 20
_JOB_ID = re.compile(r"job_[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_KEY = re.compile(rb"[\x20-\x7e]{1,255}")
_WAIT = re.compile(rb'wait[ \t]*=[ \t]*"?([0-9]{1,9})"?', re.IGNORECASE)
_MOST_PARAMETERS = 16
_SHOWN_CHARS = 64
_BAD_QUERY = "the query is not UTF-8, or has too many parameters"


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which jobs a list shows."""

    statuses: tuple[Status, ...] | None
    after: str | None
    limit: int


@dataclass(frozen=True, slots=True)
class ResultsQuery:
    """Which results: only the error lines, and of a job that runs the finished prefix."""

    only_errors: bool
    partial: bool


def check_job_id(job_id: str) -> str:
    """Return the id; one that has not the form of an id is an unknown job (raises UnknownJob)."""
    if not _JOB_ID.fullmatch(job_id):
        raise UnknownJob("no such job")
    return job_id


def parse_list(query: bytes) -> ListQuery:
    """Return what a list asks for; raises Problem 400, or UnknownJob for a cursor that cannot be a job."""
    given = _parameters(query, ("status", "after", "limit"))
    status, after, limit = given.get("status"), given.get("after"), given.get("limit")
    if status and status not in SHOWN:
        raise _bad("status", f"status is one of {', '.join(SHOWN)}")
    if limit and (not _NUMBER.fullmatch(limit) or not 1 <= int(limit) <= MOST_PER_PAGE):
        raise _bad("limit", f"limit is a whole number from 1 to {MOST_PER_PAGE}", MOST_PER_PAGE)
    return ListQuery(
        statuses=SHOWN[status] if status else None,
        after=check_job_id(after) if after else None,
        limit=int(limit) if limit else _PER_PAGE,
    )


def parse_results(query: bytes) -> ResultsQuery:
    """Return which results are asked for; raises Problem 400."""
    given = _parameters(query, ("only", "partial"))
    only, partial = given.get("only"), given.get("partial", "false")
    if only is not None and only != "errors":
        raise _bad("only", "only may be errors")
    if partial not in ("true", "false"):
        raise _bad("partial", "partial is true or false")
    return ResultsQuery(only_errors=only is not None, partial=partial == "true")


def no_query(query: bytes) -> None:
    """Raise Problem 400 where a route that takes no query is given one."""
    _parameters(query, ())


def idempotency_key(scope: Scope) -> str | None:
    """Return the caller's Idempotency-Key, or None; raises Problem 422 for what is none."""
    values: list[bytes] = [value for name, value in scope["headers"] if name == b"idempotency-key"]
    if not values:
        return None
    value = values[0].strip(b" \t")
    if len(values) > 1 or not _KEY.fullmatch(value):
        raise Problem(
            422,
            "invalid_request",
            "Idempotency-Key is given once, as 1 to 255 printable ASCII characters",
            field="header Idempotency-Key",
            limit=255,
        )
    return value.decode()


def wait_s(scope: Scope) -> int | None:
    """Return N of ``Prefer: wait=N`` (RFC 7240), or None; a preference that is not understood is no error."""
    value = header(scope, b"prefer") or b""
    for preference in value.split(b","):
        if found := _WAIT.fullmatch(preference.partition(b";")[0].strip(b" \t")):
            return int(found.group(1))
    return None


def submit_query(query: bytes) -> list[tuple[str, str]]:
    """Return the options of a JSONL body, not yet checked; raises Problem 422."""
    try:
        return _pairs(query)
    except ValueError:
        raise Problem(422, "invalid_request", _BAD_QUERY, field="query", limit=_MOST_PARAMETERS) from None


def _parameters(query: bytes, names: tuple[str, ...]) -> dict[str, str]:
    """Return the query's parameters; raises Problem 400 for another name, one given twice, or no text."""
    try:
        pairs = _pairs(query)
    except ValueError:
        raise _bad("query", _BAD_QUERY, _MOST_PARAMETERS) from None
    given: dict[str, str] = {}
    for name, value in pairs:
        if name not in names:
            detail = f"the query may hold {', '.join(names)}" if names else "this route takes no query"
            raise _bad(printable(name[:_SHOWN_CHARS]), detail)
        if name in given:
            raise _bad(name, f"{name} is given more than once")
        given[name] = value
    return given


def _pairs(query: bytes) -> list[tuple[str, str]]:
    return parse_qsl(query.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_PARAMETERS)


def _bad(field: str, detail: str, limit: float | None = None) -> Problem:
    return Problem(400, "invalid_request", detail, field=field, limit=limit)
