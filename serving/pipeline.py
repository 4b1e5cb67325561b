"""Rows to tensors to answers: the straight line both doors share."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from serving.deadline import Deadline
from serving.errors import ModelFailed, Overloaded, RowError, ServerError
from serving.models import Lane
from serving.postprocess import Answer, FloatArray, render
from serving.preprocess import Encoded, check_text, pad
from serving.registry import Model
from serving.triton_client import TritonClient


class Pipeline:
    """Runs tokenized rows on one lane of a model."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client

    async def infer(
        self,
        model: Model,
        rows: Sequence[Encoded],
        lane: Lane,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> list[Answer | RowError]:
        """Run rows as one Triton request; returns an answer or NonFiniteOutput per row, in order.

        ``ended`` is called when the model server is really done with the call, also where the caller left earlier.

        Raises ServerError where the trouble is the server's, ModelFailed where the request as a whole failed.
        """
        spec = model.spec
        output = await self._client.infer(
            spec.triton_name(lane), spec.version, pad(spec, rows), spec.output, deadline,
            priority=spec.priority(lane), headers=headers, ended=ended,
        )  # fmt: skip
        if output.shape != (len(rows), spec.output_size):
            raise ModelFailed(f"{spec.name} gave an output of another shape than its config says")
        return render(spec, output)

    async def canary_passes(self, model: Model, lane: Lane, deadline: Deadline) -> bool:
        """Return whether the lane's instance answers the model's known row rightly (True where it has none).

        Raises Overloaded where the queue is full: that says nothing of the instance.
        """
        canary, spec = model.canary, model.spec
        if canary is None:
            return True
        try:
            output: FloatArray = await self._client.infer(
                spec.triton_name(lane), spec.version, canary.inputs, spec.output, deadline, priority=spec.priority(lane)
            )
        except Overloaded:
            raise
        except (ServerError, RowError):
            return False
        return output.shape == (1, spec.output_size) and bool(
            np.allclose(output[0], canary.values, rtol=0, atol=canary.tolerance)
        )


async def encode(
    model: Model, texts: Sequence[object], truncate: bool, max_chars: int, offload_bytes: int
) -> list[Encoded | RowError]:
    """Check and tokenize texts; an error stands in the place of its row.

    More than ``offload_bytes`` of text leaves the event loop's thread: below it the hop costs more than it frees.
    """
    size_chars = sum(len(text) for text in texts if isinstance(text, str))
    if size_chars > offload_bytes:
        return await asyncio.to_thread(check_and_encode, model, texts, truncate, max_chars)
    return check_and_encode(model, texts, truncate, max_chars)


def check_and_encode(model: Model, texts: Sequence[object], truncate: bool, max_chars: int) -> list[Encoded | RowError]:
    """Do what ``encode`` does, in this thread."""
    errors = [check_text(text, max_chars) for text in texts]
    good = [text for text, error in zip(texts, errors, strict=True) if error is None and isinstance(text, str)]
    rest = iter(model.tokenizer.encode(good, truncate) if good else ())
    return [next(rest) if error is None else error for error in errors]
