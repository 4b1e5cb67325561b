"""Writes docs/settings.md from the settings classes: ``python -m serving.settings_doc [--check | --print]``."""

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from serving.settings import ALL_SETTINGS, OTHER_VARIABLES, Settings, env_names

TARGET = Path("docs/settings.md")
_HEAD = """# Settings

Written by `python -m serving.settings_doc` from `serving/settings.py`; change it there. `make check` compares.

Every setting is an environment variable with its unit in its name. An empty variable counts as not set. A wrong value
stops the process at its start with a line that names the variable; a `TWODOOR_` variable that means nothing is named in
a warning.
"""
_BOUNDS: tuple[tuple[type, str, str], ...] = (
    (Ge, "ge", "at least {}"),
    (Gt, "gt", "over {}"),
    (Le, "le", "at most {}"),
    (Lt, "lt", "under {}"),
)


def render() -> str:
    """Return the whole page."""
    parts = [_HEAD, *(_section(cls) for cls in ALL_SETTINGS)]
    other = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in sorted(OTHER_VARIABLES.items())]
    parts.append("\n".join(["## Other variables", "", "| variable | meaning |", "|---|---|", *other, ""]))
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, print it, or compare it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m serving.settings_doc", description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare only; exit 1 when the file is not up to date")
    mode.add_argument("--print", action="store_true", dest="show", help="print the page and write nothing")
    parser.add_argument("--file", type=Path, default=TARGET, help=f"where the page is (default: {TARGET})")
    args = parser.parse_args(argv)
    page = render()
    if args.show:
        sys.stdout.write(page)
        return 0
    old = args.file.read_text(encoding="utf-8") if args.file.is_file() else ""
    if args.check:
        return _report(args.file, old, page)
    if old != page:
        args.file.write_text(page, encoding="utf-8")
    return 0


def _report(file: Path, old: str, new: str) -> int:
    if old == new:
        return 0
    lines = difflib.ndiff(old.splitlines(), new.splitlines())
    first = next((line for line in lines if line.startswith(("+ ", "- "))), "")
    sys.stderr.write(f"{file} is not up to date (first difference: {first[:120]}); run: make docs\n")
    return 1


def _section(cls: type[Settings]) -> str:
    names = env_names(cls)
    rows = [
        f"| `{names[key]}` | {_default(field)} | {_kind(field)} | {_cell(field.description or '')} |"
        for key, field in cls.model_fields.items()
    ]
    title = cls.__name__.removesuffix("Settings")
    about = _cell((cls.__doc__ or "").strip().replace("``", "`"))
    return "\n".join(
        [f"## {title}", "", about, "", "| variable | default | value | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    value = field.get_default(call_default_factory=True, validated_data={})
    # A secret has no default that anybody may read.
    if value is None or value == "" or isinstance(value, SecretStr):
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list | set | frozenset):
        return f"`{','.join(str(item) for item in value)}`"
    return f"`{value}`"


def _kind(field: FieldInfo) -> str:
    """Return type and bounds in words."""
    return _cell(", ".join([_type_name(field.annotation), *_bounds(field.metadata)]))


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    choices = [arg for arg in get_args(annotation) if arg is not type(None)]
    if choices and get_origin(annotation) not in (tuple, list, set, frozenset):
        return " or ".join(_type_name(arg) for arg in choices)
    if choices:
        return "comma-separated list"
    words = {
        int: "whole number",
        float: "number",
        bool: "`true` or `false`",
        str: "text",
        SecretStr: "text",
        Path: "path",
    }
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    for item in _flat(metadata):
        for kind, attribute, words in _BOUNDS:
            if isinstance(item, kind):
                yield words.format(_number(getattr(item, attribute)))
        if isinstance(item, MinLen):
            yield "not empty" if item.min_length == 1 else f"at least {item.min_length} characters"
        if isinstance(item, MaxLen):
            yield f"at most {item.max_length} characters"


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    """Yield constraints; a Field inside Annotated keeps its own one level down."""
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _number(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
