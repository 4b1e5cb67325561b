"""Cuts a stream of JSONL into chunks by the row rules, at hundreds of MB/s and without holding any row. Pure.

A row ends at byte 0x0A only. One 0x0D before it is not part of the row, nor is a BOM at byte 0 of the input. A line of
nothing but JSON whitespace is blank: no row, but a physical line. The last line needs no newline.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jobs.records import ChunkPlan
from serving.errors import InvalidJob
from serving.settings import JobsSettings

Numbers = npt.NDArray[np.int64]
_BOM = b"\xef\xbb\xbf"
_STEP_BYTES = 256 * 2**10  # an input of nothing but newlines costs about 60 bytes for each byte of a step
_LF, _CR = 0x0A, 0x0D
_IS_BLANK = np.zeros(256, dtype=bool)
_IS_BLANK[[0x20, 0x09, _LF, _CR]] = True


class Cutter:
    """Feed it blocks of any size; it gives plans as soon as they are full, the rest at ``finish``.

    Each chunk has at most ``chunk_rows`` rows and spans at most ``chunk_bytes`` (a single row may have more). It starts
    at its first row and ends behind its last, so blank lines lie inside or between chunks, never at an edge. A row over
    ``max_row_bytes`` is a chunk of its own. ``row_count`` and ``size_bytes`` tell what has been seen so far.
    """

    def __init__(self, settings: JobsSettings, field: str = "body") -> None:
        self._settings, self._field = settings, field
        self.row_count = 0
        self.size_bytes = 0
        self._head: bytes | None = b""  # the first bytes, until it is known whether they are a BOM
        self._line_start = 0
        self._line = 1
        self._line_has_content = False
        self._last_byte = _LF
        self._open: ChunkPlan | None = None
        self._done: list[ChunkPlan] = []

    def feed(self, block: bytes) -> Sequence[ChunkPlan]:
        """Take the next bytes; returns the chunks that are full. Raises InvalidJob over ``max_rows``."""
        if self._head is not None:
            self._head += block[: len(_BOM)]
            if len(self._head) < len(_BOM) and _BOM.startswith(self._head):
                self.size_bytes += len(block)
                return ()
            block, self._head = self._first_block(self._head, block), None
        for first in range(0, len(block), _STEP_BYTES):
            self._cut(block[first : first + _STEP_BYTES])
        return self._take()

    def finish(self) -> Sequence[ChunkPlan]:
        """Say that the input is complete; returns the chunks that are left."""
        if self._head is not None:
            block, self._head = self._head, None
            self.size_bytes = 0
            self._cut(block)
        if self._line_has_content:
            length = self.size_bytes - self._line_start - (self._last_byte == _CR)
            self._add(_numbers(self._line_start), _numbers(self.size_bytes), _numbers(self._line), _numbers(length))
            self._line_has_content = False
        self._close()
        return self._take()

    def _first_block(self, head: bytes, block: bytes) -> bytes:
        """Return what is to be cut now that the first bytes are known; a BOM is passed over."""
        held = self.size_bytes
        whole = head[:held] + block
        self.size_bytes = 0
        if whole.startswith(_BOM):
            self.size_bytes = self._line_start = len(_BOM)
            return whole[len(_BOM) :]
        return whole

    def _cut(self, block: bytes) -> None:
        base = self.size_bytes
        self.size_bytes += len(block)
        data = np.frombuffer(block, dtype=np.uint8)
        newlines: Numbers = np.flatnonzero(data == _LF)
        if len(newlines):
            self._lines(data, newlines, base)
        rest = data[newlines[-1] + 1 :] if len(newlines) else data
        if not self._line_has_content and len(rest):
            self._line_has_content = not bool(_IS_BLANK[rest].all())
        self._last_byte = block[-1] if block else self._last_byte

    def _lines(self, data: npt.NDArray[np.uint8], newlines: Numbers, base: int) -> None:
        """Add the lines that end in this block; the first one may have begun in an earlier block."""
        starts = np.empty_like(newlines)
        starts[0], starts[1:] = self._line_start - base, newlines[:-1] + 1
        before = data[newlines - 1]  # for a newline at 0 this is the block's last byte: mended below
        if newlines[0] == 0:
            before[0] = self._last_byte
        lengths = newlines - starts - (before == _CR)
        lines = self._line + np.arange(len(newlines), dtype=np.int64)
        keep = self._has_content(data, starts, newlines)
        self._line += len(newlines)
        self._line_start = base + int(newlines[-1]) + 1
        self._line_has_content = False
        self._add(starts[keep] + base, newlines[keep] + 1 + base, lines[keep], lengths[keep])

    def _has_content(self, data: npt.NDArray[np.uint8], starts: Numbers, newlines: Numbers) -> npt.NDArray[np.bool_]:
        inside = np.maximum(starts, 0)
        keep = ~_IS_BLANK[data[inside]]  # a row that starts with content, as nearly all do
        if not keep.all():
            content = ~_IS_BLANK[data[: newlines[-1] + 1]]
            keep = np.logical_or.reduceat(content, inside)
        keep[0] |= self._line_has_content
        return keep

    def _add(self, starts: Numbers, ends: Numbers, lines: Numbers, lengths: Numbers) -> None:
        """Put rows into chunks; works a chunk at a time, not a row at a time."""
        if self.row_count + len(starts) > self._settings.max_rows:
            limit = self._settings.max_rows
            raise InvalidJob(f"the input has more rows than {limit}", field=self._field, limit=limit)
        oversized = [*np.flatnonzero(lengths > self._settings.max_row_bytes).tolist(), len(starts)]
        row = 0
        for big in oversized:
            while row < big:
                row = self._extend(starts, ends, lines, row, big)
            if row < len(starts):
                self._close()
                self._done.append(self._plan(int(starts[row]), int(ends[row]), 1, int(lines[row]), oversized=True))
                row += 1

    def _extend(self, starts: Numbers, ends: Numbers, lines: Numbers, row: int, stop: int) -> int:
        """Add as many rows as the open chunk takes, from ``row`` on and before ``stop``; returns the next row."""
        chunk = self._open
        begin = int(starts[row]) if chunk is None else chunk.start_byte
        held = 0 if chunk is None else chunk.row_count
        fitting = int(np.searchsorted(ends, begin + self._settings.chunk_bytes, side="right"))
        last = min(fitting, row + self._settings.chunk_rows - held, stop)
        if chunk is None:
            last = max(last, row + 1)
            self._open = self._plan(begin, int(ends[last - 1]), last - row, int(lines[row]))
        elif last <= row:
            self._close()
            return row
        else:
            self.row_count += last - row
            self._open = ChunkPlan(begin, int(ends[last - 1]), chunk.first_row, held + last - row, chunk.first_line)
        return last

    def _plan(self, start: int, end: int, rows: int, line: int, oversized: bool = False) -> ChunkPlan:
        plan = ChunkPlan(start, end, self.row_count, rows, line, oversized)
        self.row_count += rows
        return plan

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
            self._open = None

    def _take(self) -> Sequence[ChunkPlan]:
        done, self._done = self._done, []
        return done


def _numbers(value: int) -> Numbers:
    return np.array([value], dtype=np.int64)
