"""Real sentences without a data set: the documentation of the Python packages installed on this machine.

Package descriptions (``METADATA``) and docstrings, cleaned of markup and cut into sentences. The same installation
gives the same sentences in the same order; nothing of them is kept.
"""

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

MIN_WORDS, MAX_WORDS, MAX_CHARS = 4, 60, 400
# No package may fill the demo alone.
PER_PACKAGE = 150
_MAX_FILES, _MAX_FILE_BYTES = 60, 200_000

_DOCSTRING = re.compile(r'^[ \t]*[rR]?"""(.+?)"""', re.DOTALL | re.MULTILINE)
_CODE_BLOCK = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ROLE = re.compile(r":[a-zA-Z:]+:`~?([^`<]+)(?: <[^`]*>)?`")
_MARKS = re.compile(r"<[^>]{1,80}>|[`*]|\|\w+\|")
# A line that is no prose: a list's mark, a heading's rule, a table, a directive, a session, a field.
_BREAK = re.compile(r"^\s*([-*+•]\s|\d+[.)]\s|[=\-~^#*_+|]{3}|\||\.\.|>>>|#|:\w|@|$)")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*[,;:.!?)]?$")


def collect(most: int) -> list[str]:
    """Return at most ``most`` different sentences, the packages by name, each package's in the order they stand."""
    found: dict[str, str] = {}
    for package in sorted(_packages(), key=lambda each: each.name.lower()):
        before = len(found)
        for sentence in _sentences_of(package):
            found.setdefault(sentence.casefold(), sentence)
            if len(found) - before >= PER_PACKAGE or len(found) >= most:
                break
        if len(found) >= most:
            break
    return list(found.values())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a description or a docstring that read as prose."""
    text = _ROLE.sub(r"\1", _LINK.sub(r"\1", _CODE_BLOCK.sub("", text)))
    for paragraph in _paragraphs(text):
        for sentence in _SENTENCE_END.split(" ".join(_MARKS.sub("", paragraph).split())):
            if is_prose(sentence):
                yield sentence


def is_prose(sentence: str) -> bool:
    """Return whether a sentence begins and ends as one and is made of words."""
    words = sentence.split()
    if not MIN_WORDS <= len(words) <= MAX_WORDS or len(sentence) > MAX_CHARS or not sentence.isprintable():
        return False
    if not sentence[0].isupper() or sentence[-1] not in ".!?" or "://" in sentence:
        return False
    return sum(bool(_WORD.match(word)) for word in words) >= 0.8 * len(words)


def _packages() -> Iterator[Distribution]:
    seen = set()
    for package in distributions():
        # A broken installation may have no name; a name may be found twice on the path.
        if package.name and package.name not in seen:
            seen.add(package.name)
            yield package


def _sentences_of(package: Distribution) -> Iterator[str]:
    # The description is what stands below the headers.
    yield from sentences((package.read_text("METADATA") or "").partition("\n\n")[2])
    files = sorted((file for file in package.files or () if file.suffix == ".py"), key=str)
    for file in files[:_MAX_FILES]:
        for docstring in _DOCSTRING.findall(_read(Path(str(file.locate())))):
            yield from sentences(docstring)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _MAX_FILE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""  # listed and not there, or not text: there are others


def _paragraphs(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in text.splitlines():
        broken = _BREAK.match(line)
        if broken and lines:
            yield "\n".join(lines)
            lines = []
        mark = broken.group(1) if broken else ""
        if not broken or (mark and (mark[0] in "-*+•" or mark[0].isdigit()) and mark[-1].isspace()):
            lines.append(line[broken.end() :] if broken else line)
    if lines:
        yield "\n".join(lines)
