"""One owned partition's window: records read and not yet committed, and the finished prefix that may be committed."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice

from batch_consumer.records import Headers, Request, Source
from batch_consumer.rows import Outcome
from serving.errors import RowError

# Kafka keeps at most offset.metadata.max.bytes (default 4096) with an offset.
MAX_METADATA_CHARS = 3_500
_METADATA_MARK = "twodoor1"

Suspects = dict[tuple[int, int], int]
"""(offset, row index) → deaths of the model's process with that row alone in flight."""


class Record:
    """One record of the request topic: the owner of its rows, and later the source of its one result or dead letter."""

    __slots__ = (
        "headers",
        "key",
        "missing",
        "outcomes",
        "request",
        "source",
        "trace",
        "unreadable",
        "value",
        "weight",
        "window",
    )

    def __init__(
        self, window: "Window", source: Source, key: bytes | None, headers: Headers, value: bytes | None
    ) -> None:
        self.window = window
        self.source = source
        self.key = key
        self.headers = headers
        self.value = value
        self.request: Request | None = None
        self.unreadable: RowError | None = None
        self.trace: Mapping[str, str] = {}
        """Headers that carry the producer's trace on."""
        self.outcomes: list[Outcome | None] = []
        self.missing = 0
        self.weight = 1

    @property
    def alive(self) -> bool:
        """Whether the window this record was read into is still open."""
        return self.window.is_open

    @property
    def is_tombstone(self) -> bool:
        """Whether the record has no value: it is skipped."""
        return self.value is None

    @property
    def size_bytes(self) -> int:
        """Bytes of key and value, as they came."""
        return len(self.key or b"") + len(self.value or b"")

    def expect(self, request: Request) -> None:
        """Set what the record asks for; it is finished once every text has its outcome."""
        self.request = request
        self.outcomes = [None] * len(request.texts)
        self.missing = len(request.texts)
        self.weight = max(1, self.missing)

    def finish(self, index: int, outcome: Outcome) -> None:
        """Take the outcome of one row; a second one for the same row changes nothing."""
        if self.outcomes[index] is None:
            self.outcomes[index] = outcome
            self.missing -= 1
            if not self.missing:
                self.window.advance()

    def suspect(self, index: int, deaths: int | None) -> None:
        """Remember in the committed offset that this row is under suspicion, or forget it."""
        self.window.set_suspect((self.source.offset, index), deaths)


class Window:
    """Records of one partition between the fence and the loss of the partition.

    A window is never opened twice: after a rebalance or a lost transaction a new one begins at the committed offset,
    and whatever still comes in for the old one is dropped, because it is closed.
    """

    def __init__(self, position: int, suspects: Suspects, max_records: int, max_bytes: int) -> None:
        """``position`` is the offset of the next record to commit, and the first one to read."""
        self.position = position
        self.next_read = position
        self.suspects = suspects
        self.changed = asyncio.Event()
        self.is_open = True
        self.is_closed = False
        self.remember = False
        """Set when the suspects changed: the committed offset's metadata has to be written even without progress."""
        self.finished_since_s: float | None = None
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._running: deque[Record] = deque()
        self._finished: deque[Record] = deque()
        self._weight = 0
        self._bytes = 0

    @property
    def room(self) -> int:
        """How many more records may be read now."""
        if not self.is_open or self._bytes >= self._max_bytes:
            return 0
        return max(0, self._max_records - self._weight)

    @property
    def unfinished(self) -> int:
        """Records that wait for an answer."""
        return len(self._running)

    @property
    def finished(self) -> int:
        """Records of the contiguous finished prefix."""
        return len(self._finished)

    @property
    def uncommitted(self) -> int:
        """Records read and not yet committed."""
        return len(self._running) + len(self._finished)

    def add(self, records: Iterable[Record]) -> None:
        """Add records in offset order; those without rows are finished at once."""
        for record in records:
            self._running.append(record)
            self._weight += record.weight
            self._bytes += record.size_bytes
        self.advance()

    def advance(self) -> None:
        """Move what is finished at the head of the window into the prefix that may be committed."""
        if self.is_closed:
            return
        while self._running and not self._running[0].missing:
            self._finished.append(self._running.popleft())
        if self._finished:
            self.finished_since_s = self.finished_since_s or time.monotonic()
            self.changed.set()

    def prefix(self, most: int) -> list[Record]:
        """Return up to ``most`` records of the finished prefix, in offset order."""
        return list(islice(self._finished, most))

    def committed(self, records: list[Record]) -> None:
        """Drop records whose transaction is committed: they were the head of the prefix."""
        for record in records:
            self._finished.popleft()
            self._weight -= record.weight
            self._bytes -= record.size_bytes
            self.position = record.source.offset + 1
        self.suspects = {key: deaths for key, deaths in self.suspects.items() if key[0] >= self.position}
        self.finished_since_s = time.monotonic() if self._finished else None

    def set_suspect(self, key: tuple[int, int], deaths: int | None) -> None:
        """Change the suspects; None takes one off."""
        if self.is_closed:
            return
        if deaths is None:
            # The next commit writes it; a forgotten acquittal costs one lone run, so it needs no commit of its own.
            self.suspects.pop(key, None)
        else:
            self.suspects[key] = deaths
            self.remember = True
            self.changed.set()

    def stop(self) -> None:
        """Take no more records and let no further row start; what runs may still finish."""
        self.is_open = False
        self.changed.set()

    def close(self) -> None:
        """Drop everything; answers that still come in are ignored."""
        self.is_open = False
        self.is_closed = True
        self._running.clear()
        self._finished.clear()
        self.changed.set()


def write_suspects(suspects: Mapping[tuple[int, int], int], position: int) -> str:
    """Return the suspects as the metadata of a committed offset, those with most deaths first if not all fit."""
    text = ""
    for (offset, index), deaths in sorted(suspects.items(), key=lambda item: (-item[1], item[0])):
        if offset < position:
            continue
        entry = f" {offset}.{index}.{deaths}"
        if len(text) + len(entry) > MAX_METADATA_CHARS:
            break
        text += entry
    return _METADATA_MARK + text if text else ""


def read_suspects(metadata: str | None) -> Suspects:
    """Read what ``write_suspects`` wrote; metadata of anybody else counts as none."""
    mark, *entries = (metadata or "").split(" ")
    if mark != _METADATA_MARK:
        return {}
    suspects: Suspects = {}
    for entry in entries:
        try:
            offset, index, deaths = map(int, entry.split("."))
        except ValueError:
            return {}
        suspects[offset, index] = deaths
    return suspects
