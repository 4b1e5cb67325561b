"""The ceiling: a plain ONNX Runtime loop over rows sorted by length, with no server between."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime

from benchmarks.stats import FloatArray, IdArray


@dataclass(frozen=True, slots=True)
class LoopJob:
    """One process's part of a loop: every ``shares``-th batch from ``share`` on. Rows come sorted by length."""

    model: str
    inputs: tuple[str, ...]
    output: str
    rows: Sequence[IdArray]
    batch: int = 16
    threads: int = 2
    spin: bool = False
    share: int = 0
    shares: int = 1


@dataclass(frozen=True, slots=True)
class LoopShare:
    """When one process began and ended, and its rows' outputs in order, FP32 of shape [rows, size]."""

    begin_s: float
    end_s: float
    outputs: FloatArray


class _Prepared:
    """A loop that is ready to run: model loaded, every batch built, first and last shape run once."""

    def __init__(self, job: LoopJob) -> None:
        self._outputs = [job.output]
        self._session = _session(job)
        self._batches = [_tensors(job, rows) for rows in _batches(job)]
        for batch in (self._batches[0], self._batches[-1]):
            self._session.run(self._outputs, batch)

    def run(self) -> LoopShare:
        begin_s = time.monotonic()
        outputs = [self._session.run(self._outputs, batch)[0] for batch in self._batches]
        return LoopShare(begin_s, time.monotonic(), np.concatenate(outputs))


# What this worker process has prepared: loading happens before, so that all processes of a loop begin together.
_prepared: dict[str, _Prepared] = {}


def prepare(job: LoopJob) -> None:
    """Load the model and build the batches (in a worker)."""
    _prepared.clear()
    _prepared["loop"] = _Prepared(job)


def run_prepared(begin_at_s: float) -> LoopShare:
    """Run what was prepared, from a moment of the monotonic clock on (in the same worker)."""
    time.sleep(max(0.0, begin_at_s - time.monotonic()))
    return _prepared.pop("loop").run()


def _session(job: LoopJob) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if job.spin else "0")
    return onnxruntime.InferenceSession(job.model, options, providers=["CPUExecutionProvider"])


def _batches(job: LoopJob) -> list[Sequence[IdArray]]:
    batches = [job.rows[at : at + job.batch] for at in range(0, len(job.rows), job.batch)]
    return batches[job.share :: job.shares] or batches[:1]


def _tensors(job: LoopJob, rows: Sequence[IdArray]) -> dict[str, IdArray]:
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: given[name] for name in job.inputs}
