"""The canary row: one fixed row and its answer, by which anybody can tell a sick model from a bad row."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from model_builder.run import Runner
from model_builder.tokens import Encoder

TEXT = "a warm and quietly funny film that earns its happy ending"
# Wide enough for FP16 and for another machine's kernels, narrow against a broken or exchanged model.
TOLERANCE = 0.05


def make(runner: Runner, encode: Encoder, output: str) -> dict[str, Any]:
    """Return the content of canary.json, computed by ONNX Runtime on the CPU."""
    (row,) = encode([TEXT])
    values = runner([row])[0]
    return {
        "inputs": {"input_ids": row.tolist(), "attention_mask": [1] * len(row)},
        "output": {"name": output, "values": [round(float(value), 5) for value in values], "tolerance": TOLERANCE},
    }


def deviation(runner: Runner, canary: Mapping[str, Any]) -> float:
    """Return the largest difference between the canary's values and the model's answer; inf for another shape."""
    row = np.array(canary["inputs"]["input_ids"], np.int64)
    values = runner([row])[0]
    wanted = np.array(canary["output"]["values"], np.float32)
    if values.shape != wanted.shape or not np.isfinite(values).all():
        return float("inf")
    return float(np.abs(values - wanted).max())
