"""Callers of a peer: each call is its natural POST with one text, over the same connections as Twodoor's callers use."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import orjson

from benchmarks.callers import Expected, checked_calls, get, post
from benchmarks.load import CALL_TIMEOUT_S, Call
from benchmarks.peers.catalog import Wire

V2_PATH = "/v2/models/sentiment/infer"


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """A peer's server. Travels to the processes that make the load."""

    address: tuple[str, int]
    wire: Wire
    health: str
    """A path whose GET costs nothing."""
    texts: Sequence[str]
    expected: Sequence[Expected]

    def calls(self, callers: int) -> AbstractAsyncContextManager[list[Call]]:
        """Open keep-alive connections."""
        return _calls(self, callers)

    async def probe(self) -> str:
        """Make one call over a connection of its own; returns an empty string, or in a word what was wrong.

        Raises OSError where nobody listens, TimeoutError where no answer came.
        """
        async with asyncio.timeout(CALL_TIMEOUT_S), _calls(self, 1, dial=False) as calls:
            return await calls[0](0)


def _calls(target: PeerTarget, callers: int, *, dial: bool = True) -> AbstractAsyncContextManager[list[Call]]:
    host = f"{target.address[0]}:{target.address[1]}"
    path = V2_PATH if target.wire == "v2" else "/predict"
    requests = [post(path, body_of(target.wire, text), host) for text in target.texts]
    first = get(target.health, host) if dial else None
    return checked_calls(target.address, requests, target.expected, READERS[target.wire], callers, first)


def body_of(wire: Wire, text: str) -> bytes:
    """Return the body that asks for one text."""
    if wire == "text":
        return orjson.dumps({"text": text})
    if wire == "texts":
        return orjson.dumps({"texts": [text]})
    given = {
        "name": "text",
        "shape": [1, 1],
        "datatype": "BYTES",
        "parameters": {"content_type": "str"},
        "data": [text],
    }
    return orjson.dumps({"inputs": [given]})


def _read_one(answer: Any) -> tuple[bool, float]:
    return answer["label"] == "positive", answer["score"]


def _read_v2(answer: Any) -> tuple[bool, float]:
    outputs = {output["name"]: output["data"][0] for output in answer["outputs"]}
    return outputs["label"] == "positive", outputs["score"]


READERS: dict[Wire, Callable[[Any], tuple[bool, float]]] = {
    "text": _read_one,
    "texts": lambda answer: _read_one(answer[0]),
    "v2": _read_v2,
}
