"""Change a few fields of a config.pbtxt and leave the rest, comments too, as a person wrote it."""

import re
from collections.abc import Iterator, Mapping, Sequence

from model_builder.config import quote
from serving.errors import ConfigError

_TOKEN = re.compile(r"""#[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[\[\]{}<>]|[\w.+-]+|\S""")
_OPENING, _CLOSING = frozenset("[{<"), frozenset("]}>")
_KEY = re.compile(r"""key\s*:\s*["']([^"']*)["']""")


def edit(text: str, versions: Sequence[str], parameters: Mapping[str, str]) -> str:
    """Return the config with these versions to load and these parameters; what it says of them now goes.

    Raises ConfigError where one of the parameters stands in a list with others.
    """
    kept, at = [], 0
    for name, start, end in _fields(text):
        if name == "version_policy" or (name == "parameters" and _replaced(text[start:end], parameters)):
            kept.append(text[at:start].rstrip(" \t"))
            at = end + 1 if text[end : end + 1] == "\n" else end
    kept.append(text[at:])
    lines = [f"version_policy {{ specific {{ versions: [ {', '.join(sorted(versions, key=int))} ] }} }}"]
    lines += [
        f"parameters {{ key: {quote(key)} value {{ string_value: {quote(value)} }} }}"
        for key, value in parameters.items()
    ]
    return "".join(kept).rstrip("\n") + "\n" + "\n".join(lines) + "\n"


def _replaced(field: str, parameters: Mapping[str, str]) -> bool:
    keys = _KEY.findall(field)
    found = [key for key in keys if key in parameters]
    if found and len(keys) > 1:
        raise ConfigError(f"config.pbtxt: give parameter {found[0]} a `parameters {{ … }}` of its own")
    return bool(found)


def _fields(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, end) of each top-level field whose value is a message or a list."""
    depth, name, start = 0, "", 0
    for match in _TOKEN.finditer(text):
        found = match.group()
        if found.startswith("#"):
            continue
        if found in _OPENING:
            depth += 1
        elif found in _CLOSING:
            depth -= 1
            if depth == 0:
                yield name, start, match.end()
        elif depth == 0 and found != ":":
            # The name of the field that comes next, or the value of one that is neither message nor list.
            name, start = found, match.start()
    if depth:
        raise ConfigError("config.pbtxt: its brackets do not match")
