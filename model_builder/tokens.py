"""Tokenizer folders in Hugging Face form, and token ids for what the builder itself runs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from serving.errors import ConfigError

Row = NDArray[np.int64]
_COPIED = ("special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt")
_SPECIAL_ROLES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def write_bert_folder(tokenizer_json: Path, folder: Path, max_tokens: int) -> None:
    """Make a folder AutoTokenizer loads without a network from a BERT-like tokenizer.json alone."""
    folder.mkdir(parents=True)
    definition = _without_state(_read_json(tokenizer_json))
    _write_json(folder / "tokenizer.json", definition)
    special = {item["content"] for item in definition.get("added_tokens", ())}
    roles = {role: token for role, token in _SPECIAL_ROLES.items() if token in special}
    _write_json(folder / "tokenizer_config.json", _config(max_tokens) | roles)
    _write_json(folder / "special_tokens_map.json", roles)


def copy_folder(source: Path, folder: Path, max_tokens: int) -> None:
    """Copy a user's fast tokenizer, without the padding and truncation its file may carry.

    Raises ConfigError where the folder has no tokenizer.json or its config asks for code of its own.
    """
    if not (source / "tokenizer.json").is_file():
        raise ConfigError(f"{source} has no tokenizer.json: save a fast tokenizer there (tokenizer.save_pretrained)")
    folder.mkdir(parents=True)
    _write_json(folder / "tokenizer.json", _without_state(_read_json(source / "tokenizer.json")))
    settings = _config(max_tokens)
    if (source / "tokenizer_config.json").is_file():
        own = _read_json(source / "tokenizer_config.json")
        if "auto_map" in own:
            raise ConfigError(f"{source}/tokenizer_config.json asks for code of its own (auto_map), which is never run")
        settings = own | {key: settings[key] for key in ("model_max_length", "model_input_names", "tokenizer_class")}
    _write_json(folder / "tokenizer_config.json", settings)
    for name in _COPIED:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def max_length(source: Path) -> int | None:
    """Return the limit a tokenizer's config states, or None where it states none worth the name."""
    path = source / "tokenizer_config.json"
    value = _read_json(path).get("model_max_length") if path.is_file() else None
    return int(value) if isinstance(value, int | float) and 1 < value <= 100_000 else None


class Encoder:
    """Texts to token ids as the doors make them: the model's prefix first, special tokens typed by a caller as text."""

    def __init__(self, folder: Path, prompt_prefix: str) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as exc:  # noqa: BLE001 - the library raises bare Exception for any broken file
            raise ConfigError(f"{folder}/tokenizer.json is no tokenizer: {str(exc)[:200]}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self._prefix = prompt_prefix

    def __call__(self, texts: Sequence[str]) -> list[Row]:
        """Return one INT64 row of token ids for each text."""
        encoded = self._tokenizer.encode_batch([self._prefix + text for text in texts])
        return [np.array(item.ids, np.int64) for item in encoded]

    @property
    def highest_id(self) -> int:
        """The largest id the tokenizer may give."""
        return max(self._tokenizer.get_vocab().values())


def _config(max_tokens: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }


def _without_state(definition: dict[str, Any]) -> dict[str, Any]:
    return definition | {"truncation": None, "padding": None}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"{path} is not readable JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
