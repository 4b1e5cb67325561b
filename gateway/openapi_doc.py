"""Writes the routes' part of docs/api.md from the OpenAPI document: ``python -m gateway.openapi_doc [--check]``."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from gateway import routes
from gateway.openapi import document

TARGET = Path("docs/api.md")
BEGIN, END = "<!-- routes:begin -->", "<!-- routes:end -->"


def render() -> str:
    """Return a section for each route, and the fields of a job and of an error."""
    app = FastAPI(title="Twodoor")
    app.include_router(routes.router)
    made = document(app, with_jobs=True)
    schemas = made["components"]["schemas"]
    parts = [
        "\n".join(_route(method, path, operation))
        for path, operations in made["paths"].items()
        for method, operation in operations.items()
    ]
    parts += ["\n".join(_fields(name, schemas[name])) for name in ("Job", "Problem")]
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page's part, or compare it; returns the exit code. The page must have both marks."""
    parser = argparse.ArgumentParser(prog="python -m gateway.openapi_doc", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when the file is not up to date")
    parser.add_argument("--file", type=Path, default=TARGET, help=f"where the page is (default: {TARGET})")
    args = parser.parse_args(argv)
    page = args.file.read_text(encoding="utf-8")
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        sys.stderr.write(f"{args.file} lacks {BEGIN} or {END}\n")
        return 1
    new = f"{head}{BEGIN}\n\n{render()}\n{END}{tail}"
    if args.check and new != page:
        sys.stderr.write(f"{args.file} does not say what the routes say; run: make docs\n")
        return 1
    if new != page:
        args.file.write_text(new, encoding="utf-8")
    return 0


def _route(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield from [f"### `{method.upper()} {path}`", "", f"{operation['summary']}.", ""]
    if parameters := operation.get("parameters"):
        yield from ["| parameter | in | value | meaning |", "|---|---|---|---|"]
        for one in parameters:
            needed = ", needed" if one.get("required") else ""
            cells = (one["in"] + needed, _kind(one["schema"]), one.get("description", ""))
            yield f"| `{one['name']}` | {' | '.join(map(_cell, cells))} |"
        yield ""
    if body := operation.get("requestBody"):
        yield from _body("Body", body["content"])
    yield from ["| status | means |", "|---|---|"]
    for status, answer in operation["responses"].items():
        yield f"| {status} | {_cell(answer['description'])} |"
    yield ""
    for status, answer in operation["responses"].items():
        if status < "300" and _examples(answer.get("content", {})):
            yield from _body(status, answer["content"])
            break  # A second good status has the same body.


def _body(title: str, content: dict[str, Any]) -> Iterator[str]:
    yield from [f"{title}: {' or '.join(f'`{kind}`' for kind in content)}", ""]
    for example in _examples(content):
        lines = isinstance(example, str)
        text = example.rstrip("\n") if lines else json.dumps(example, indent=2)
        yield from ["```json", text, "```", ""]


def _examples(content: dict[str, Any]) -> list[Any]:
    """Return each example once, whatever the number of content types that have it."""
    found = []
    for media in content.values():
        found += [one["value"] for one in media.get("examples", {}).values()]
        found += [media["example"]] if "example" in media else []
    return [example for place, example in enumerate(found) if example not in found[:place]]


def _fields(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield from [f"### The fields of `{name}`", "", "| field | value | meaning |", "|---|---|---|"]
    for field, one in schema["properties"].items():
        always = "" if field in schema["required"] else "not always there"
        yield f"| `{field}` | {_cell(_kind(one))} | {_cell('; '.join(filter(None, (one.get('description'), always))))} |"
    yield ""


def _kind(schema: dict[str, Any]) -> str:
    """Return type, choices, bounds and default in words."""
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    kinds = schema.get("type", "any")
    words = [" or ".join([kinds] if isinstance(kinds, str) else kinds)]
    if "properties" in schema:
        words[0] += " of " + ", ".join(f"`{name}`" for name in schema["properties"])
    for key, text in (("minimum", "at least {}"), ("maximum", "at most {}"), ("maxLength", "at most {} characters")):
        if key in schema:
            words.append(text.format(schema[key]))
    if "default" in schema:
        words.append(f"default `{json.dumps(schema['default'])}`")
    return ", ".join(words)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
