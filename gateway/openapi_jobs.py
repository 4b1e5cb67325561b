"""What the job routes say about themselves, with examples."""

from typing import Any

_PROBLEM_CONTENT = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_ID = "job_3f1c9a52b7de4c0c8a5c2f6c1d9e7b40"
_TIME: dict[str, Any] = {"type": ["string", "null"], "format": "date-time"}
_STATUSES = ["queued", "running", "completed", "failed", "cancelling", "cancelled", "expired"]
JOB_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "status": {"type": "string", "enum": _STATUSES},
        "model": {"type": "string"},
        "model_version": {"type": ["string", "null"], "description": "Pinned when the first chunk runs."},
        "rows": {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in ("total", "succeeded", "failed", "pending")},
        },
        "progress": {"type": "number", "minimum": 0, "maximum": 1},
        "created_at": _TIME,
        "started_at": _TIME,
        "finished_at": _TIME,
        "deadline_at": _TIME | {"description": "The end of the completion window."},
        "expires_at": _TIME | {"description": "When the results are removed; null before the end."},
        "metadata": {"type": "object"},
        "error": {"type": "object", "properties": {"code": {"type": "string"}, "message": {"type": "string"}}},
    },
    "required": ["id", "status", "model", "rows", "progress", "created_at", "metadata"],
}
_JOB: dict[str, Any] = {
    "id": _ID,
    "status": "running",
    "model": "sentiment_model",
    "model_version": "1",
    "rows": {"total": 3, "succeeded": 1, "failed": 1, "pending": 1},
    "progress": 0.667,
    "created_at": "2026-01-05T09:30:00.000000Z",
    "started_at": "2026-01-05T09:30:00.400000Z",
    "finished_at": None,
    "deadline_at": "2026-01-06T09:30:00.000000Z",
    "expires_at": None,
    "metadata": {"run": "nightly"},
}
_SUBMISSION: dict[str, Any] = {
    "model": "sentiment_model",
    "inputs": ["a gorgeous, witty, seductive movie", {"id": "r2", "text": "dull and far too long"}],
    "metadata": {"run": "nightly"},
}
_LINES = '"a gorgeous, witty, seductive movie"\n{"id": "r2", "text": "dull and far too long"}\n'
_RESULTS = (
    '{"index":0,"output":{"sentiment":"positive","label":"positive","score":0.97,'
    '"scores":{"negative":0.03,"positive":0.97}}}\n'
    '{"index":1,"id":"r2","error":{"code":"empty_text","message":"text is empty or blank","line":2}}\n'
)
_BULK = {
    "state": "running",
    "epoch": 4,
    "consumers": [
        {
            "id": "host-1-4711",
            "epoch": 4,
            "rows_in_flight": 32,
            "started_at": "2026-01-05T09:00:00.000000Z",
            "seen_at": "2026-01-05T09:30:01.000000Z",
        }
    ],
}

_ALWAYS = {
    "401": "No known key (where the door has keys)",
    "503": "The ledger or the object store is away, or too much work; Retry-After says when to come back",
    "504": "The deadline passed",
}
_ADMIN = {"403": "Not an admin's key"}
_OFTEN = {"400": "A query parameter is wrong", "422": "X-Timeout-Ms is no whole number of milliseconds"}
_UNKNOWN = {"404": "No such job, also another tenant's"}


def _header(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": text}


def _query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": text}


def _json(example: Any, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"application/json": {"example": example} | ({"schema": schema} if schema else {})}


_JOB_CONTENT = _json(_JOB, {"$ref": "#/components/schemas/Job"})


def _operation(
    summary: str, answers: dict[str, tuple[str, dict[str, Any]]], errors: dict[str, str], **more: Any
) -> dict[str, Any]:
    good = {code: {"description": text} | ({"content": made} if made else {}) for code, (text, made) in answers.items()}
    told = _OFTEN | errors | _ALWAYS
    bad = {code: {"description": told[code], "content": _PROBLEM_CONTENT} for code in sorted(told)}
    return {"summary": summary, "responses": good | bad, **more}


_WINDOWS = [
    _query("truncate", {"type": "boolean", "default": False}, "Cut texts to the model's limit."),
    _query("metadata", {"type": "string"}, "A JSON object, kept with the job."),
    _query("completion_window_s", {"type": "integer"}, "After this time what has not run is given up."),
    _query("result_ttl_s", {"type": "integer"}, "How long results are kept after the end."),
]
_SUBMIT = _operation(
    "Submit a job",
    {"202": ("Accepted: every row will have exactly one result line", _JOB_CONTENT)},
    {
        "400": "The body was cut, or is not the gzip it says",
        "404": "No such model",
        "408": "The body came too slowly",
        "413": "The body is larger than the limit, counted after decoding",
        "415": "Neither JSON nor JSONL in UTF-8, or an encoding other than gzip",
        "422": "A field is wrong, there is no row, or the Idempotency-Key was used for another request",
        "429": "The tenant has as many rows waiting as its key allows; Retry-After says when to come back",
    },
    parameters=[
        _query("model", {"type": "string"}, "Of a JSONL body; a JSON body names it itself."),
        *_WINDOWS,
        _header(
            "Idempotency-Key",
            {"type": "string", "maxLength": 255},
            "Send it again after a broken call: one job is made.",
        ),
    ],
    requestBody={
        "required": True,
        "content": _json(_SUBMISSION)
        | {
            kind: {"example": _LINES, "schema": {"type": "string"}}
            for kind in ("application/jsonl", "application/x-ndjson")
        },
    },
)
_RESULTS_ANSWER = {"application/x-ndjson": {"example": _RESULTS, "schema": {"type": "string"}}}

JOB_PATHS: dict[str, dict[str, Any]] = {
    "/v1/jobs": {
        "post": _SUBMIT,
        "get": _operation(
            "List jobs, newest first",
            {"200": ("A page", _json({"data": [_JOB], "has_more": True, "next": _ID}))},
            {"404": "The cursor names no job"},
            parameters=[
                _query("status", {"type": "string", "enum": _STATUSES}, "Only jobs in this status."),
                _query("after", {"type": "string"}, "`next` of the page before."),
                _query(
                    "limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "Most jobs of a page."
                ),
            ],
        ),
    },
    "/v1/jobs/{job_id}": {
        "get": _operation(
            "Show a job",
            {"200": ("The job", _JOB_CONTENT)},
            _UNKNOWN,
            parameters=[_header("Prefer", {"type": "string"}, "`wait=N` waits up to N seconds for the end.")],
        ),
        "delete": _operation(
            "Delete an ended job and its results",
            {"204": ("Deleted", {})},
            _UNKNOWN | {"409": "The job has not ended"},
        ),
    },
    "/v1/jobs/{job_id}/results": {
        "get": _operation(
            "Fetch results in row order",
            {"200": ("All lines", _RESULTS_ANSWER), "206": ("A range of them", _RESULTS_ANSWER)},
            _UNKNOWN | {"409": "The job has not ended", "416": "The range begins behind the end"},
            parameters=[
                _query("only", {"type": "string", "enum": ["errors"]}, "Only the lines of rows that failed."),
                _query("partial", {"type": "boolean"}, "Before the end: what is finished, from the first row on."),
                _header("Range", {"type": "string"}, "One range of bytes."),
                _header("If-Range", {"type": "string"}, "The ETag the range is of."),
            ],
        )
    },
    "/v1/jobs/{job_id}/cancel": {
        "post": _operation(
            "Cancel a job",
            {
                "202": ("It begins to cancel", _JOB_CONTENT),
                "200": ("It was ending or had ended: unchanged", _JOB_CONTENT),
            },
            _UNKNOWN,
        )
    },
    "/v1/admin/bulk": {"get": _operation("Show bulk work", {"200": ("The state", _json(_BULK))}, _ADMIN)},
    "/v1/admin/bulk/pause": {"post": _operation("Pause bulk work", {"200": ("The state", _json(_BULK))}, _ADMIN)},
    "/v1/admin/bulk/resume": {"post": _operation("Resume bulk work", {"200": ("The state", _json(_BULK))}, _ADMIN)},
    "/v1/admin/models": {
        "get": _operation(
            "Show which model versions open jobs have begun on: a model server keeps them loaded",
            {"200": ("Versions by model", _json({"pinned": {"sentiment_model": ["1"]}}))},
            _ADMIN,
        )
    },
}
_PLACE = {"name": "job_id", "in": "path", "required": True, "schema": {"type": "string"}}
_DEADLINE = _header("X-Timeout-Ms", {"type": "integer", "minimum": 1}, "The caller's deadline; not of a JSONL body.")
for _path, _operations in JOB_PATHS.items():
    for _one in _operations.values():
        _places = [_PLACE] if "{job_id}" in _path else []
        _one["parameters"] = [*_places, *_one.get("parameters", []), _DEADLINE]

EXAMPLES: tuple[tuple[str, Any], ...] = (
    ("Request of POST /v1/jobs", _SUBMISSION),
    ("The same as application/jsonl, with ?model=sentiment_model", _LINES),
    ("A job", _JOB),
    ("Results", _RESULTS),
)
"""For the page for people: a title and a value or the lines themselves."""
