"""Read SST-2: text, tab, 0 or 1 on each line. Used by the scripts that make the committed tables, and by checks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigError

DEFAULT_DIR = Path("../shared/data/sst2")


@dataclass(frozen=True)
class Split:
    """One file's sentences and their labels (0 negative, 1 positive), in file order."""

    texts: list[str]
    labels: list[int]


def folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder TWODOOR_SST2_DIR names, or the default one; it need not exist."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("TWODOOR_SST2_DIR") or DEFAULT_DIR)


def read(path: Path) -> Split:
    """Read one TSV file; raises ConfigError when it is missing or a line has no label."""
    texts, labels = [], []
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError:
        raise ConfigError(
            f"{path} cannot be read: set TWODOOR_SST2_DIR to the folder of train, dev and test.tsv"
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        text, tab, label = line.rpartition("\t")
        if not tab or label not in ("0", "1"):
            raise ConfigError(f"{path}, line {number}: expected text, a tab, and 0 or 1")
        texts.append(text)
        labels.append(int(label))
    return Split(texts, labels)
