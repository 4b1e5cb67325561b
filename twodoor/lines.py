"""A JSON lines file becomes records of the request topic. A row ends at byte 0x0A only; nothing here talks to Kafka."""

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, BinaryIO

BOM = b"\xef\xbb\xbf"
FIELDS = {"id", "model", "text", "inputs", "truncate"}
PROTOBUF = "application/x-protobuf"


class BadLine(Exception):
    """A line that is no record; the message says why, without the line's number."""


@dataclass(frozen=True, slots=True)
class Record:
    """What goes to Kafka: the id is the key, so that records of one id keep their order."""

    value: bytes
    key: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()


class LineSplitter:
    """Cuts blocks of bytes into numbered lines; never holds more than one block and ``max_bytes`` of a line."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._number = 0
        self._too_large = False

    def feed(self, block: bytes) -> list[tuple[int, bytes | None]]:
        """Return the lines that end in this block, as (number from 1, bytes); None for one that is too large."""
        *ended, rest = (self._rest + block).split(b"\n")
        lines = [self._line(line) for line in ended]
        if len(rest) > self._max_bytes + len(BOM) + 1:
            self._too_large, rest = True, b""
        self._rest = rest
        return lines

    def end(self) -> list[tuple[int, bytes | None]]:
        """Return the last line where no line end follows it."""
        return [self._line(self._rest)] if self._rest or self._too_large else []

    def _line(self, line: bytes) -> tuple[int, bytes | None]:
        self._number += 1
        too_large, self._too_large = self._too_large, False
        line = line.removeprefix(BOM) if self._number == 1 else line
        line = line.removesuffix(b"\r")
        return self._number, None if too_large or len(line) > self._max_bytes else line


async def read_lines(stream: BinaryIO, max_bytes: int) -> AsyncIterator[tuple[int, bytes | None, int]]:
    """Yield (number, line, bytes read so far) of a file or pipe, without ever blocking the event loop."""
    splitter, read_bytes = LineSplitter(max_bytes), 0
    async for block in _blocks(stream):
        read_bytes += len(block)
        for number, line in splitter.feed(block):
            yield number, line, read_bytes
    for number, line in splitter.end():
        yield number, line, read_bytes


async def _blocks(stream: BinaryIO) -> AsyncIterator[bytes]:
    """Read on a thread of its own: a daemon, because nothing can interrupt a read from a silent pipe."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue(2)

    def put(item: bytes | OSError) -> None:
        asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

    def read() -> None:
        try:
            while block := _read_some(stream):
                put(block)
            put(b"")
        except OSError as exc:
            put(exc)
        except (CancelledError, RuntimeError):
            return  # the loop has ended: nobody waits for the rest

    threading.Thread(target=read, name="read-lines", daemon=True).start()
    while item := await queue.get():
        if isinstance(item, OSError):
            raise item
        yield item


def _read_some(stream: BinaryIO) -> bytes:
    """Return what is there, at least one byte, or nothing at the end."""
    return stream.read1(65_536) if isinstance(stream, io.BufferedReader) else stream.read(65_536)


def parse(line: bytes, default_model: str) -> dict[str, Any]:
    """Return the request a line holds: a JSON string is a text, an object a request. Raises BadLine.

    Only the form is looked at: a text that is empty or too long is the model's business and gets its error result.
    """
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as exc:
        raise BadLine(f"not UTF-8 at byte {exc.start}") from None
    except (ValueError, RecursionError) as exc:
        raise BadLine(f"not JSON: {exc}") from None
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise BadLine("neither a JSON string nor an object")
    _check(value)
    return {"model": default_model, **value}


def _check(request: dict[str, Any]) -> None:
    unknown = sorted(set(request) - FIELDS)
    if unknown:
        raise BadLine(f"unknown field {unknown[0]!r}")
    if ("text" in request) == ("inputs" in request):
        raise BadLine("needs either text or inputs")
    for name, kind in (("id", str), ("model", str), ("text", str), ("truncate", bool), ("inputs", list)):
        if name in request and not isinstance(request[name], kind):
            raise BadLine(f"{name} is not a {'list' if kind is list else 'string' if kind is str else 'boolean'}")
    if not all(isinstance(text, str) for text in request.get("inputs", ())):
        raise BadLine("inputs is not a list of strings")


def encode(request: dict[str, Any], content_type: str) -> Record:
    """Return a request in its JSON or protobuf form; raises BadLine where protobuf cannot hold it."""
    request_id = request.get("id")
    try:
        key = request_id.encode() if request_id else None
        if content_type == "protobuf":
            from serving.v1.bulk_pb2 import BulkRequest

            return Record(BulkRequest(**request).SerializeToString(), key, (("content-type", PROTOBUF.encode()),))
    except (UnicodeEncodeError, ValueError):
        raise BadLine("holds a lone surrogate, which is no character") from None
    return Record(json.dumps(request).encode("ascii"), key)


def decode_result(value: bytes, headers: tuple[tuple[str, bytes], ...]) -> dict[str, Any]:
    """Return a result record as the dictionary its JSON form has; raises ValueError where it is none."""
    if dict(headers).get("content-type", b"").decode("latin-1") != PROTOBUF:
        body = json.loads(value)
        if not isinstance(body, dict):
            raise ValueError("a result is an object")
        return body
    from google.protobuf.message import DecodeError

    from serving.v1.bulk_pb2 import BulkResult

    try:
        result = BulkResult.FromString(value)
    except DecodeError as exc:
        raise ValueError("not protobuf") from exc
    body = {"id": result.id, "model": result.model}
    answer = result.WhichOneof("answer")
    if answer == "output":
        body["output"] = _prediction(result.output)
    elif answer == "predictions":
        body["predictions"] = [_prediction(row) for row in result.predictions.predictions]
    elif answer == "error":
        body["error"] = {"code": result.error.code, "message": result.error.message}
    source = result.source
    body["source"] = {"topic": source.topic, "partition": source.partition, "offset": source.offset}
    return body


def _prediction(row: Any) -> dict[str, Any]:
    kind = row.WhichOneof("kind")
    if kind == "embedding":
        return {"embedding": list(row.embedding.values)}
    if kind == "error":
        return {"error": {"code": row.error.code, "message": row.error.message}}
    found = row.classification
    answer = {"label": found.label, "score": found.score, "scores": dict(found.scores)}
    return {"sentiment": found.sentiment, **answer} if found.sentiment else answer
