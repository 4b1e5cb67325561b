"""What a submission sends: rows of a program, or JSON lines of a file or a stream. Never whole in memory.

Whatever it is, it can be read from its beginning again, so that a submission can be repeated: rows of an iterator
and of a pipe go through a temporary file first.
"""

import io
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

Rows = Iterable[str | Mapping[str, Any]] | os.PathLike[str] | BinaryIO
Progress = Callable[[int, int | None], None]
"""Is told how many bytes were read for sending, and of how many (None where nobody knows)."""

# Rows that fit into so many bytes travel inside one JSON body.
SMALL_BYTES = 256 * 2**10
_PIECE_BYTES = 64 * 2**10
_GZIP = 31  # zlib's name for "a gzip header and trailer"


@dataclass(frozen=True, slots=True)
class Options:
    """What a job may be told besides its rows."""

    model: str
    truncate: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    completion_window_s: int | None = None
    result_ttl_s: int | None = None

    def members(self) -> dict[str, Any]:
        """Return those that are not the default, as members of a JSON body."""
        found: dict[str, Any] = {"model": self.model}
        if self.truncate:
            found["truncate"] = True
        if self.metadata:
            found["metadata"] = dict(self.metadata)
        for name in ("completion_window_s", "result_ttl_s"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        return found


@dataclass(frozen=True, slots=True)
class LinesBody:
    """JSON lines from a place in a seekable file, as they are or compressed on the way."""

    file: IO[bytes] = field(repr=False)
    start: int
    size_bytes: int
    compress: bool = False
    encoded: bool = False
    """The file is gzip already."""
    on_progress: Progress | None = field(default=None, repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What says how it travels; the length only where it is known before."""
        told = {"Content-Type": "application/jsonl"}
        if self.compress or self.encoded:
            told["Content-Encoding"] = "gzip"
        if not self.compress:
            told["Content-Length"] = str(self.size_bytes)
        return told

    def pieces(self) -> Iterator[bytes]:
        """Yield it from its beginning; raises OSError where the file became shorter meanwhile."""
        packer = zlib.compressobj(wbits=_GZIP) if self.compress else None
        for piece in self._read():
            packed = packer.compress(piece) if packer else piece
            if packed:
                yield packed
        if packer:
            yield packer.flush()

    def _read(self) -> Iterator[bytes]:
        self.file.seek(self.start)
        read_bytes = 0
        while read_bytes < self.size_bytes:
            piece = self.file.read(min(_PIECE_BYTES, self.size_bytes - read_bytes))
            if not piece:
                raise OSError("the file became shorter while it was sent")
            read_bytes += len(piece)
            if self.on_progress is not None:
                self.on_progress(read_bytes, self.size_bytes)
            yield piece


@contextmanager
def prepared(rows: Rows, options: Options, compress: bool, on_progress: Progress | None) -> Iterator[bytes | LinesBody]:
    """Yield what to send: a JSON body where rows of a program are few, JSON lines otherwise.

    Raises OSError where a file cannot be read, TypeError for what are no rows.
    """
    if isinstance(rows, str | bytes | Mapping):
        raise TypeError(f"rows is one {type(rows).__name__}; give a list of rows, or a Path to JSON lines")
    if isinstance(rows, io.TextIOBase):
        raise TypeError("the stream is a text stream; open it in binary mode")
    with ExitStack() as stack:
        if isinstance(rows, os.PathLike):
            file = stack.enter_context(Path(rows).open("rb"))
            body = _whole(file, compress, on_progress)
            gzip = Path(rows).suffix == ".gz"
            yield replace(body, encoded=True, compress=False) if gzip else body
        elif hasattr(rows, "read"):
            yield _stream(cast("BinaryIO", rows), stack, compress, on_progress)
        else:
            spool = stack.enter_context(tempfile.SpooledTemporaryFile(SMALL_BYTES))
            for row in rows:
                spool.write(_line(row))
            yield _small(spool, options) if spool.tell() <= SMALL_BYTES else _whole(spool, compress, on_progress)


def _stream(stream: BinaryIO, stack: ExitStack, compress: bool, on_progress: Progress | None) -> LinesBody:
    if stream.seekable():
        return _whole(stream, compress, on_progress, stream.tell())
    # A pipe can be read only once, and may pause for longer than the server lets an upload pause.
    spool = stack.enter_context(tempfile.SpooledTemporaryFile(SMALL_BYTES))  # noqa: SIM115 (the stack closes it)
    while piece := stream.read(_PIECE_BYTES):
        spool.write(piece)
    return _whole(spool, compress, on_progress)


def _whole(file: IO[bytes], compress: bool, on_progress: Progress | None, start: int = 0) -> LinesBody:
    return LinesBody(file, start, file.seek(0, os.SEEK_END) - start, compress, on_progress=on_progress)


def _small(spool: IO[bytes], options: Options) -> bytes:
    spool.seek(0)
    rows = spool.read().removesuffix(b"\n").replace(b"\n", b",")
    head = json.dumps(options.members()).encode("ascii").removesuffix(b"}")
    return head + b', "inputs": [' + rows + b"]}"


def _line(row: str | Mapping[str, Any]) -> bytes:
    if not isinstance(row, str | Mapping):
        raise TypeError(f"a row is a string or a mapping, not {type(row).__name__}")
    # ASCII only: no character of a text can be taken for a line's end.
    return json.dumps(row if isinstance(row, str) else dict(row), allow_nan=False).encode("ascii") + b"\n"
