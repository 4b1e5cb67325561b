"""Texts become token ids: one fast tokenizer per model, set up once and never changed afterwards."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serving.errors import ConfigError, EmptyText, InvalidRow, InvalidUnicode, RowError, RowTooLarge, TextTooLong
from serving.models import ModelSpec, padded_length, tokenizer_sha256
from serving.tokenizer_files import Backend, load_backend

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row's token ids, INT64 of shape [tokens], specials and prefix included, not padded."""

    ids: IdArray

    @property
    def tokens(self) -> int:
        """The row's length in tokens."""
        return len(self.ids)


def check_text(text: object, max_chars: int) -> RowError | None:
    """Return what is wrong with a text before it is tokenized, or None."""
    if not isinstance(text, str):
        return InvalidRow(f"text is {_json_type(text)}, expected a string")
    if len(text) > max_chars:
        return RowTooLarge(f"text has {len(text)} characters, the limit is {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return InvalidUnicode("text holds a lone surrogate, which is no character")
    if not text.strip():
        return EmptyText("text is empty or blank")
    return None


class Tokenizer:
    """A model's fast tokenizer. Padding, truncation and special tokens are set once, so threads may share it."""

    def __init__(self, folder: Path, spec: ModelSpec, loaded: MutableMapping[str, Backend] | None = None) -> None:
        """Load the folder, or take it out of ``loaded`` (hash → tokenizer).

        Raises ConfigError where it is missing or is not the one the config names.
        """
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"model {spec.name}: no tokenizer at {folder}")
        if tokenizer_sha256(folder) != spec.tokenizer_sha256:
            raise ConfigError(f"model {spec.name}: the files in {folder} are not those of parameter tokenizer_sha256")
        sha256 = spec.tokenizer_sha256
        self._backend = loaded.pop(sha256) if loaded and sha256 in loaded else load_backend(folder)
        self._backend.no_padding()
        self._backend.no_truncation()
        # Text is data: a "[SEP]" typed by a caller is encoded as text.
        self._backend.encode_special_tokens = True
        self._prefix = spec.prompt_prefix
        self._max_tokens = spec.max_tokens
        bare = self._backend.encode(self._prefix)
        self._overhead_tokens = len(bare.ids)
        self._tail_tokens = _trailing_ones(bare.special_tokens_mask)

    def reserve_tokens(self, text: str) -> int:
        """Return an upper bound of the tokens this text can cost, without tokenizing it."""
        if len(text) >= self._max_tokens:
            return self._max_tokens
        return min(self._max_tokens, len(text.encode(errors="replace")) + self._overhead_tokens)

    def encode(self, texts: Sequence[str], truncate: bool) -> list[Encoded | RowError]:
        """Tokenize texts that passed check_text; a text that is empty or too long gives its error in its place."""
        encodings = self._backend.encode_batch_fast([self._prefix + text for text in texts])
        return [self._row(encoding.ids, truncate) for encoding in encodings]

    def _row(self, ids: list[int], truncate: bool) -> Encoded | RowError:
        if len(ids) <= self._overhead_tokens:
            return EmptyText("text has no content: only characters the tokenizer drops")
        if len(ids) > self._max_tokens:
            if not truncate:
                return TextTooLong(
                    f"text has {len(ids)} tokens, the limit is {self._max_tokens}; set truncate to cut it"
                )
            ids = ids[: self._max_tokens - self._tail_tokens] + ids[len(ids) - self._tail_tokens :]
        return Encoded(np.asarray(ids, dtype=np.int64))


def pad(spec: ModelSpec, rows: Sequence[Encoded]) -> dict[str, IdArray]:
    """Return the model's input tensors, INT64 of shape [rows, padded length]."""
    length = padded_length(spec, [row.tokens for row in rows])
    ids = np.zeros((len(rows), length), dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : row.tokens] = row.ids
        mask[index, : row.tokens] = 1
    tensors = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in spec.inputs:
        tensors["token_type_ids"] = np.zeros_like(ids)
    return tensors


def _trailing_ones(mask: Sequence[int]) -> int:
    count = 0
    for bit in reversed(mask):
        if not bit:
            break
        count += 1
    return count


def _json_type(value: object) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "of an unknown type")
