"""Rows are tokenized many at once, in a thread."""

from collections import deque

import structlog

from batch_consumer.canary import PLAIN_TEXT
from batch_consumer.rows import Row
from batch_consumer.verdict import halves
from serving.errors import ModelFailed, RowError
from serving.preprocess import check_text
from serving.registry import Model

log = structlog.get_logger(__name__)

ENCODE_ROWS = 512
ENCODE_CHARS = 1_000_000


def next_rows(raw: deque[Row]) -> list[Row]:
    """Remove and return rows for one call: few enough that a long text does not keep the others long."""
    rows: list[Row] = []
    chars = 0
    while raw and len(rows) < ENCODE_ROWS and chars < ENCODE_CHARS:
        row = raw.popleft()
        if row.alive:
            rows.append(row)
            chars += len(row.text) if isinstance(row.text, str) else 0
    return rows


def encode_rows(model: Model, rows: list[Row], max_chars: int) -> list[RowError | None]:
    """Tokenize rows in place, in one call for each value of truncate; runs in a thread.

    A text that the tokenizer itself fails on is an error of its row: it would end every consumer that comes to it.
    """
    try:
        return _encode_all(model, rows, max_chars)
    except BaseException as error:  # a panic of the tokenizer's Rust code is no Exception
        if isinstance(error, MemoryError | SystemExit | KeyboardInterrupt):
            raise
        if len(rows) > 1:
            first, second = halves(rows)
            return [*encode_rows(model, first, max_chars), *encode_rows(model, second, max_chars)]
        # Where it fails on a plain text too, it is the tokenizer that is broken.
        model.tokenizer.encode([PLAIN_TEXT], True)
        log.exception("the tokenizer failed on one text", model=rows[0].model)
        return [ModelFailed("the model's tokenizer failed on this text while it took others")]


def _encode_all(model: Model, rows: list[Row], max_chars: int) -> list[RowError | None]:
    errors = [check_text(row.text, max_chars) for row in rows]
    for truncate in (False, True):
        chosen = [i for i, row in enumerate(rows) if errors[i] is None and row.truncate is truncate]
        texts = [text for i in chosen if isinstance(text := rows[i].text, str)]
        if not texts:
            continue
        for i, encoded in zip(chosen, model.tokenizer.encode(texts, truncate), strict=True):
            if isinstance(encoded, RowError):
                errors[i] = encoded
            else:
                rows[i].encoded, rows[i].tokens = encoded, encoded.tokens
                rows[i].tokenizer = model.spec.tokenizer_sha256
    return errors
