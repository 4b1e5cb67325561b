"""Train the sentiment head: `python -m model_builder.train_head`. Plain NumPy, deterministic, about a minute.

A logistic regression over the frozen FP32 embeddings of SST-2's training sentences, by Newton's method; the weight of
the L2 penalty is the one with the best log loss on the dev sentences. Reads TWODOOR_SST2_DIR, writes the committed
table. The test sentences are not read.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model_builder import say, sst2, tables
from model_builder.recipes import SENTIMENT, embedding_graph
from model_builder.run import Runner
from model_builder.sources import fetch
from model_builder.tokens import Encoder, write_bert_folder

PENALTIES = (0.03, 0.1, 0.2, 0.3, 0.5, 1.0)
Matrix = NDArray[np.float64]


def fit(features: Matrix, labels: Matrix, penalty: float) -> Matrix:
    """Return weights [h + 1], bias last, that minimise log loss plus penalty/2 · |weights without bias|²."""
    rows = np.hstack([features, np.ones((len(features), 1))])
    ridge = np.full(rows.shape[1], penalty)
    ridge[-1] = 0.0
    weights = np.zeros(rows.shape[1])
    for _ in range(50):
        probability = 1 / (1 + np.exp(-rows @ weights))
        gradient = rows.T @ (probability - labels) + ridge * weights
        curvature = (rows * (probability * (1 - probability))[:, None]).T @ rows + np.diag(ridge)
        step = np.linalg.solve(curvature, gradient)
        weights -= step
        if np.abs(step).max() < 1e-10:
            return weights
    raise ArithmeticError("Newton's method did not converge")


def log_loss(features: Matrix, labels: Matrix, weights: Matrix) -> float:
    """Return the mean negative log likelihood."""
    score = features @ weights[:-1] + weights[-1]
    return float(np.mean(np.logaddexp(0, -score) * labels + np.logaddexp(0, score) * (1 - labels)))


def main() -> None:
    """Read the data, train, write the table, and say what was chosen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path(".models-cache"))
    parser.add_argument("--output", type=Path, default=tables.HEAD)
    arguments = parser.parse_args()
    files = fetch(SENTIMENT.source, arguments.cache, say.progress)
    model = embedding_graph(files.onnx)
    runner = Runner(model.SerializeToString(), os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        write_bert_folder(files.tokenizer, Path(folder) / "tokenizer", SENTIMENT.max_tokens)
        encode = Encoder(Path(folder) / "tokenizer", SENTIMENT.prompt_prefix)
    splits = {}
    for name in ("train", "dev"):
        split = sst2.read(sst2.folder() / f"{name}.tsv")
        features = runner.sorted_batches(encode(split.texts), 16).astype(np.float64)
        splits[name] = (features, np.array(split.labels, np.float64))
    mean = splits["train"][0].mean(axis=0)
    train, dev = ((features - mean, labels) for features, labels in splits.values())
    losses = {penalty: log_loss(*dev, fit(*train, penalty)) for penalty in PENALTIES}
    best = min(losses, key=lambda penalty: losses[penalty])
    weights = fit(*train, best)
    table = {
        "made_by": "python -m model_builder.train_head",
        "embedding": f"{SENTIMENT.source.coordinates}, FP32, mean-pooled, L2-normed",
        "penalty": best,
        "dev_log_loss": tables.rounded(losses[best], 4),
        "weight": [tables.rounded(value) for value in weights[:-1]],
        "bias": tables.rounded(weights[-1] - float(mean @ weights[:-1])),
    }
    tables.save(arguments.output, table)
    say.answer(f"penalty {best}, log loss on dev {losses[best]:.4f}: wrote {arguments.output}")


if __name__ == "__main__":
    main()
