"""What the routes say about themselves: the OpenAPI document, with examples, and a page that needs no internet."""

import json
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.openapi_jobs import EXAMPLES, JOB_PATHS, JOB_SCHEMA

_TEXT = {"type": "string", "minLength": 1}
_ROW_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            "required": ["code", "message"],
        }
    },
    "required": ["error"],
}
_ANSWER = {
    "type": "object",
    "properties": {
        "sentiment": {"type": "string"},
        "label": {"type": "string"},
        "score": {"type": "number", "description": "Probability of the label; of positive for a sentiment model."},
        "scores": {"type": "object", "additionalProperties": {"type": "number"}},
        "embedding": {"type": "array", "items": {"type": "number"}},
    },
}
_PROBLEM = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "description": "Stable: programs may branch on it."},
        "request_id": {"type": "string"},
        "field": {"type": "string"},
        "row": {"type": "integer"},
        "limit": {"type": "number"},
        "retry_after_s": {"type": "number"},
    },
    "required": ["type", "title", "status", "detail", "code", "request_id"],
}
_REQUESTS: dict[str, Any] = {
    "one text": {"text": "a gorgeous, witty, seductive movie"},
    "a list": {"text": ["a gorgeous, witty, seductive movie", "", "dull and far too long"]},
    "another model, cut to its limit": {"text": "any text", "model": "embedding_model", "truncate": True},
}
_ANSWERS: dict[str, Any] = {
    "one text": {"sentiment": "positive", "score": 0.97},
    "a list": {
        "model": "sentiment_model",
        "model_version": "1",
        "predictions": [
            {
                "sentiment": "positive",
                "label": "positive",
                "score": 0.97,
                "scores": {"negative": 0.03, "positive": 0.97},
            },
            {"error": {"code": "empty_text", "message": "text is empty or blank"}},
            {
                "sentiment": "negative",
                "label": "negative",
                "score": 0.02,
                "scores": {"negative": 0.98, "positive": 0.02},
            },
        ],
    },
    "an embedding": {"embedding": [0.0123, -0.0456]},
}
_ERRORS = {
    "400": "The body is not what its Content-Encoding says",
    "401": "No known key (where the door has keys)",
    "404": "No such model",
    "408": "The body came too slowly",
    "413": "The body is larger than the limit, counted after decoding",
    "415": "Not JSON in UTF-8, or an encoding other than gzip",
    "422": "The call has the wrong form, or its single text has an error of its own",
    "429": "The key's tenant sends more rows a second than it may; Retry-After says when to come back",
    "502": "The model answered NaN or Inf for the single text",
    "503": "Too much work, or the model server is away; Retry-After says when to come back",
    "504": "The deadline passed",
}
_PROBLEM_CONTENT = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def _examples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: {"value": value} for name, value in values.items()}


PREDICT: dict[str, Any] = {
    "parameters": [
        {"name": "text", "in": "query", "required": False, "schema": _TEXT, "description": "Instead of a body."},
        {
            "name": "X-Timeout-Ms",
            "in": "header",
            "required": False,
            "schema": {"type": "integer", "minimum": 1},
            "description": "The caller's deadline, counted from the request's head.",
        },
        {"name": "X-Request-Id", "in": "header", "required": False, "schema": {"type": "string", "maxLength": 128}},
    ],
    "requestBody": {
        "required": False,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "text": {"oneOf": [_TEXT, {"type": "array", "items": {"type": "string"}, "minItems": 1}]},
                        "model": {"type": "string"},
                        "truncate": {"type": "boolean", "default": False},
                    },
                    "required": ["text"],
                    "additionalProperties": False,
                },
                "examples": _examples(_REQUESTS),
            }
        },
    },
    "responses": {
        "200": {
            "description": "One answer, or one per text in the order of the texts",
            "content": {
                "application/json": {
                    "schema": {
                        "oneOf": [
                            _ANSWER,
                            {
                                "type": "object",
                                "properties": {
                                    "model": {"type": "string"},
                                    "model_version": {"type": "string"},
                                    "predictions": {"type": "array", "items": {"oneOf": [_ANSWER, _ROW_ERROR]}},
                                },
                                "required": ["model", "model_version", "predictions"],
                            },
                        ]
                    },
                    "examples": _examples(_ANSWERS),
                }
            },
        },
        **{code: {"description": text, "content": _PROBLEM_CONTENT} for code, text in _ERRORS.items()},
    },
}
_PLAIN_ROUTES = {
    "/healthz": ("The process is alive", "application/json", {"status": "ok"}),
    "/readyz": ("The process takes requests", "application/json", {"dependencies": {"triton": "up"}}),
    "/metrics": ("Metrics in Prometheus's text format", "text/plain", None),
}


def document(app: FastAPI, with_jobs: bool) -> dict[str, Any]:
    """Return the OpenAPI document of the app."""
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, (text, media_type, example) in _PLAIN_ROUTES.items():
        content = {media_type: {"example": example} if example else {}}
        made["paths"][path] = {
            "get": {"summary": text, "responses": {"200": {"description": text, "content": content}}}
        }
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Problem"] = _PROBLEM
    if with_jobs:
        made["paths"] |= JOB_PATHS
        schemas["Job"] = JOB_SCHEMA
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"key": []}, {}]  # a door without keys asks for none
    return made


def docs_page(with_jobs: bool) -> bytes:
    """Return a page about the routes that needs nothing from elsewhere."""
    rows = "".join(f"<tr><td>{code}<td>{escape(text)}" for code, text in _ERRORS.items())
    shown = [("Request", _REQUESTS), ("Answer", _ANSWERS)]
    blocks = "".join(
        f"<h3>{title}: {escape(name)}</h3>{_block(value)}" for title, values in shown for name, value in values.items()
    )
    plain = "".join(f"<li><code>GET {path}</code> {escape(text)}" for path, (text, _, _) in _PLAIN_ROUTES.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Twodoor</title>'
        "<style>body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
        "pre{background:#f4f4f4;padding:1em;overflow:auto}td{padding:.2em 1em .2em 0}</style>"
        "<h1>Twodoor: the interactive door</h1>"
        '<p>The machine-readable form is <a href="/openapi.json">/openapi.json</a> (OpenAPI). Where the door has keys, '
        "send <code>Authorization: Bearer KEY</code>."
        "<h2>POST /predict</h2><p>Send <code>?text=…</code> or a JSON body. <code>X-Timeout-Ms</code> sets the deadline, "
        "<code>X-Request-Id</code> is echoed. Every error is <code>application/problem+json</code> with a stable "
        f"<code>code</code>.{blocks}<h3>Errors</h3><table>{rows}</table>{_jobs() if with_jobs else ''}"
        '<h2>WS /v1/stream</h2><p>A WebSocket for many texts: <code>{"id", "text", "model"?, "truncate"?}</code> gives '
        '<code>{"id", "output"}</code> or <code>{"id", "error": {"code", "message"}}</code>, as they are ready.'
        f"<h2>Other routes</h2><ul>{plain}</ul></html>"
    ).encode()


def _jobs() -> str:
    routes = "".join(
        f"<tr><td><code>{method.upper()} {path}</code><td>{escape(operation['summary'])}<td>"
        + ", ".join(operation["responses"])
        for path, operations in JOB_PATHS.items()
        for method, operation in operations.items()
    )
    blocks = "".join(f"<h3>{escape(title)}</h3>{_block(value)}" for title, value in EXAMPLES)
    return (
        "<h2>Jobs</h2><p>A job takes any number of rows and keeps their results until they are fetched or expire. "
        f"<table>{routes}</table>{blocks}"
    )


def _block(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, indent=2)
    return f"<pre>{escape(text)}</pre>"
