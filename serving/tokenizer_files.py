"""A folder of Hugging Face files becomes a fast tokenizer: by `tokenizers` alone where that gives the same one."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

__all__ = ["Backend", "is_plain", "load_backend", "tokenizer_folders"]

# One thread per door: the tokenizer must not take cores from the model (DESIGN section 6).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_FILES = frozenset({"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"})
_ROLES = frozenset(
    {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"},
)
# Keys of tokenizer_config.json that change no token of a tokenizer whose class is the plain one.
_SILENT = frozenset(
    {
        "tokenizer_class", "model_max_length", "model_input_names", "clean_up_tokenization_spaces", "padding_side",
        "truncation_side", "backend", "is_local", "name_or_path",
    }
)  # fmt: skip
_PLAIN_CLASS = "PreTrainedTokenizerFast"
_MOST_WORDS = 100_000


def load_backend(folder: Path) -> Backend:
    """Return the tokenizer that ``transformers.AutoTokenizer`` makes of a folder; blocks, and raises what its libraries raise.

    Importing transformers costs a start more than everything else a door imports. A folder that leaves it nothing to do
    but to read ``tokenizer.json``, as `twodoor models` writes them, is read without it.
    """
    if is_plain(folder):
        return Backend.from_file(str(folder / "tokenizer.json"))
    from transformers import AutoTokenizer

    # local_files_only: a door never reaches for a hub.
    found: Backend = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    return found


def is_plain(folder: Path) -> bool:
    """Return whether ``tokenizer.json`` says all: the rest only names tokens that it holds, in the same words.

    Where it has no post-processor transformers puts one in, and it mends some tokenizers of large vocabularies.
    """
    if not {file.name for file in folder.iterdir()} <= _FILES:
        return False
    config = _read(folder / "tokenizer_config.json")
    if config.get("tokenizer_class") != _PLAIN_CLASS or not config.keys() <= _SILENT | _ROLES:
        return False
    named = _read(folder / "special_tokens_map.json")
    if not named.keys() <= _ROLES:
        return False
    definition = _read(folder / "tokenizer.json")
    added = {item["content"] for item in definition.get("added_tokens") or () if item["special"]}
    if not definition.get("post_processor") or len(definition["model"]["vocab"]) + len(added) > _MOST_WORDS:
        return False
    tokens = [config[role] for role in config.keys() & _ROLES] + list(named.values())
    return all(token is None or (isinstance(token, str) and token in added) for token in tokens)


def _read(file: Path) -> Mapping[str, Any]:
    content = json.loads(file.read_bytes()) if file.is_file() else {}
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return content


def tokenizer_folders(repository: Path, first: str) -> list[Path]:
    """Return the tokenizers of a model repository, the models' own and their versions'; the model ``first`` before others."""
    found = [path for pattern in ("*/tokenizer", "*/[0-9]*/tokenizer") for path in repository.glob(pattern)]
    return sorted(found, key=lambda path: (path.relative_to(repository).parts[0] != first, path))
