"""Run a built model with ONNX Runtime alone, without Triton: for canaries, comparisons and measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_builder.tokens import Row

Outputs = NDArray[np.float32]
_TYPES = "token_type_ids"


def batch(rows: Sequence[Row], length: int | None = None) -> dict[str, NDArray[np.int64]]:
    """Pad rows to ``length`` (default: the longest) and return input_ids and attention_mask INT64 [b, s]."""
    width = length or max(len(row) for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


class Runner:
    """One ONNX Runtime session on the CPU."""

    def __init__(self, model: Path | bytes, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # a failed run raises; ONNX Runtime need not print it too
        source = str(model) if isinstance(model, Path) else model
        self._session: Any = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    @property
    def inputs(self) -> list[str]:
        """The names of the model's inputs."""
        return [item.name for item in self._session.get_inputs()]

    @property
    def outputs(self) -> list[str]:
        """The names of the model's outputs."""
        return [item.name for item in self._session.get_outputs()]

    def __call__(self, rows: Sequence[Row], length: int | None = None) -> Outputs:
        """Return the model's only output for one batch; token types, if it takes them, are zeros."""
        feed = batch(rows, length)
        if _TYPES in self.inputs:
            feed[_TYPES] = np.zeros_like(feed["input_ids"])
        outputs: Outputs = self._session.run(None, feed)[0]
        return outputs

    def sorted_batches(self, rows: Sequence[Row], size: int, length: int | None = None) -> Outputs:
        """Return the outputs in the rows' order, run in batches of ``size`` sorted by length."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        parts = [
            self([rows[index] for index in order[start : start + size]], length) for start in range(0, len(order), size)
        ]
        together = np.concatenate(parts)
        result = np.empty_like(together)
        result[order] = together
        return result
