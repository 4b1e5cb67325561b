"""Compare a grafted graph with plain NumPy over the hidden states of the graph it was made from."""

import numpy as np
import onnx
from numpy.typing import NDArray

from model_builder.graph import ATTENTION_MASK, Head
from model_builder.run import Runner, batch
from model_builder.tokens import Row
from serving.errors import ConfigError

GRAFT_TOLERANCE = 1e-4


def pooled(hidden: NDArray[np.float32], mask: NDArray[np.int64]) -> NDArray[np.float32]:
    """Mean over the real tokens of hidden [b, s, h], then L2 norm: [b, h]."""
    weights = mask[:, :, None].astype(np.float32)
    mean = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
    normed: NDArray[np.float32] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    return normed


def compare(before: onnx.ModelProto, after: onnx.ModelProto, rows: list[Row], head: Head | None, threads: int) -> float:
    """Return the largest difference between ``after`` and NumPy over ``before``'s hidden states.

    Raises ConfigError when it is over the tolerance: the graft is wrong for this graph.
    """
    hidden = Runner(before.SerializeToString(), threads)(rows)
    expected = pooled(hidden, batch(rows)[ATTENTION_MASK])
    if head is not None:
        expected = expected @ head.weight + head.bias
    got = Runner(after.SerializeToString(), threads)(rows)
    worst = float(np.abs(got - expected).max())
    if not worst <= GRAFT_TOLERANCE:
        raise ConfigError(f"the grafted graph differs from plain NumPy pooling by {worst:.2g}")
    return worst
