"""What every peer's server shares: its settings, and the model with its tokenizer, called with a list of texts."""

import ctypes
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

VARIABLE = "PEER_SETTINGS"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """One configuration of a peer; it travels to every process of the server in the variable PEER_SETTINGS."""

    model_folder: str
    home: str
    """An empty folder for whatever the framework writes."""
    port: int
    processes: int
    """Processes that each hold the model."""
    threads: int
    """Threads of one process's ONNX Runtime session."""
    second_port: int
    """A second free port, for a framework that insists on one."""
    batching: bool
    prefix: str
    max_tokens: int
    max_batch: int = 32
    max_wait_ms: int = 0
    host: str = "127.0.0.1"

    @property
    def max_wait_s(self) -> float:
        """How long a batch waits for its next row."""
        return self.max_wait_ms / 1000

    @classmethod
    def read(cls) -> Self:
        """Read the settings of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


class Model:
    """Tokenizer and model file. Rows of one call are padded to the longest among them."""

    def __init__(self, settings: Settings) -> None:
        folder = Path(settings.model_folder)
        self._prefix = settings.prefix
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        self._tokenizer.enable_truncation(settings.max_tokens)
        self._tokenizer.enable_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = settings.threads
        options.inter_op_num_threads = 1
        # A thread that spins takes the core that the server itself and its callers wait for.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        file = str(folder / "1" / "model.onnx")
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self._inputs = [given.name for given in self._session.get_inputs()]
        self.answer(["warm up", "warm up with a second row"])

    def answer(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Return for each text its ``label`` and ``score``, the probability of positive."""
        rows = self._tokenizer.encode_batch_fast([self._prefix + text for text in texts])
        tensors = {
            "input_ids": np.array([row.ids for row in rows], dtype=np.int64),
            "attention_mask": np.array([row.attention_mask for row in rows], dtype=np.int64),
            "token_type_ids": np.zeros((len(rows), len(rows[0].ids)), dtype=np.int64),
        }
        logits = self._session.run(None, {name: tensors[name] for name in self._inputs})[0]
        scores = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
        return [{"label": "positive" if score > 0.5 else "negative", "score": float(score)} for score in scores]


def end_with_parent() -> None:
    """Ask to be stopped where the benchmark is killed; the frameworks stop their own processes then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
