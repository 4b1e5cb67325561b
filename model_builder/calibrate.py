"""Make the table of activation ranges for the static INT8 sentiment model: `python -m model_builder.calibrate`.

Runs 256 training sentences of SST-2, spread evenly over the file, one by one through the FP32 graph and records the
smallest and largest value of each MatMul input. Reads TWODOOR_SST2_DIR, writes the committed table.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np

from model_builder import say, sst2, tables
from model_builder.quantize import observe
from model_builder.recipes import SENTIMENT, embedding_graph
from model_builder.sources import fetch
from model_builder.tokens import Encoder, write_bert_folder

SENTENCES = 256


def main() -> None:
    """Read the data, observe the ranges, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path(".models-cache"))
    parser.add_argument("--output", type=Path, default=tables.RANGES)
    arguments = parser.parse_args()
    files = fetch(SENTIMENT.source, arguments.cache, say.progress)
    model = embedding_graph(files.onnx)
    texts = sst2.read(sst2.folder() / "train.tsv").texts
    chosen = [texts[int(index)] for index in np.linspace(0, len(texts) - 1, SENTENCES)]
    with tempfile.TemporaryDirectory() as folder:
        write_bert_folder(files.tokenizer, Path(folder) / "tokenizer", SENTIMENT.max_tokens)
        encode = Encoder(Path(folder) / "tokenizer", SENTIMENT.prompt_prefix)
    seen = observe(model, encode(chosen), os.cpu_count() or 1)
    table = {
        "made_by": "python -m model_builder.calibrate",
        "method": f"smallest and largest value over {SENTENCES} training sentences of SST-2, FP32 graph",
        "ranges": {name: [tables.rounded(low), tables.rounded(high)] for name, (low, high) in seen.items()},
    }
    tables.save(arguments.output, table)
    say.answer(f"{len(seen)} ranges: wrote {arguments.output}")


if __name__ == "__main__":
    main()
