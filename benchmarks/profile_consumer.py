"""What a consumer's own work costs: CPU microseconds a row by stage, in one process, with no server. ``python -m benchmarks.profile_consumer``"""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import orjson

from batch_consumer.encode import ENCODE_ROWS, encode_rows
from batch_consumer.intake import _parse_all, _rows
from batch_consumer.microbatch import MAX_TOKENS_CPU, Backlog
from batch_consumer.partition import Record, Window
from batch_consumer.records import Source
from batch_consumer.results import Target, outgoing
from batch_consumer.rows import Row
from benchmarks.corpus import read_spec, sst2_texts
from serving.models import ModelSpec
from serving.postprocess import render
from serving.preprocess import Tokenizer, pad
from serving.settings import ConsumerSettings, ModelSettings, load
from serving.triton_client import parse_config

ROWS = 3_600
RUNS = 3
T = TypeVar("T")
RESULTS, DEAD_LETTERS = Target("results", 12, 2**20), Target("dlq", 12, 2**20)


class Profile:
    """The stages in their order; each keeps what the next one needs."""

    def __init__(self, folder: Path, values: list[bytes]) -> None:
        self._spec: ModelSpec = read_spec(parse_config((folder / "config.pbtxt").read_text()), folder, "1")
        self._model: Any = SimpleNamespace(spec=self._spec, tokenizer=Tokenizer(folder / "tokenizer", self._spec))
        self._settings = load(ConsumerSettings)
        self._values = values

    def run(self) -> dict[str, float]:
        """Return stage → CPU microseconds a row, the least of some runs."""
        cost: dict[str, float] = {}
        records = self._timed(cost, "records parsed", self._read)
        rows = [row for record in records for row in _rows(record)]
        self._timed(cost, "tokenized", lambda: self._encode(rows))
        batches = self._timed(cost, "micro-batches chosen", lambda: self._choose(rows))
        self._timed(cost, "padded", lambda: [pad(self._spec, [r.encoded for r in b if r.encoded]) for b in batches])
        outputs = [np.zeros((len(batch), self._spec.output_size), dtype=np.float32) for batch in batches]
        answers = self._timed(cost, "answers made", lambda: [render(self._spec, output) for output in outputs])
        for batch, outcomes in zip(batches, answers, strict=True):
            for row, outcome in zip(batch, outcomes, strict=True):
                row.finish(outcome)
        self._timed(cost, "results written as JSON", lambda: outgoing(records, RESULTS, DEAD_LETTERS))
        return cost

    def _timed(self, cost: dict[str, float], stage: str, work: Callable[[], T]) -> T:
        least_s = float("inf")
        for _ in range(RUNS):
            begin_s = time.process_time()
            made = work()
            least_s = min(least_s, time.process_time() - begin_s)
        cost[stage] = least_s / len(self._values) * 1e6
        return made

    def _read(self) -> list[Record]:
        window = Window(0, {}, len(self._values), 2**40)
        places = (Source("requests", 0, offset) for offset in range(len(self._values)))
        records = [Record(window, place, None, (), value) for place, value in zip(places, self._values, strict=True)]
        _parse_all(records, self._settings.max_rows_per_record)
        return records

    def _encode(self, rows: list[Row]) -> None:
        for begin in range(0, len(rows), ENCODE_ROWS):
            encode_rows(self._model, rows[begin : begin + ENCODE_ROWS], self._settings.max_text_chars)

    def _choose(self, rows: list[Row]) -> list[list[Row]]:
        backlog, batches = Backlog(), []
        most_rows, most_tokens = self._settings.max_microbatch_rows, self._settings.max_microbatch_tokens
        for row in rows:
            backlog.add(row)
        while batch := backlog.take(most_rows, most_tokens or MAX_TOKENS_CPU):
            batches.append(batch)
        return batches


def main() -> None:
    """Print the stages and their sum."""
    models = load(ModelSettings)
    texts = sst2_texts(ROWS)
    values = [
        orjson.dumps({"id": f"row-{number}", "model": models.default, "text": text})
        for number, text in enumerate(texts.texts)
    ]
    cost = Profile(models.repository / models.default, values).run()
    for stage, micros in [*cost.items(), ("together", sum(cost.values()))]:
        print(f"{stage:<24} {micros:8.1f} µs of CPU a row")


if __name__ == "__main__":
    main()
