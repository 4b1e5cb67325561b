"""One row on its way through the lane, and what the lane needs to know of whoever handed it over."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from batch_consumer.turns import TOPIC, Feeder
from serving.errors import RowError
from serving.postprocess import Answer
from serving.preprocess import Encoded

Outcome = Answer | RowError


class Owner(Protocol):
    """The record (or chunk) a row belongs to."""

    @property
    def alive(self) -> bool:
        """False once nobody waits for this row any more: its partition was taken away, its chunk is lost or ends."""
        ...

    def finish(self, index: int, outcome: Outcome) -> None:
        """Take the one outcome of row ``index``."""
        ...

    def suspect(self, index: int, deaths: int | None) -> None:
        """Remember beyond this process that the row is under suspicion with so many deaths; None clears it."""
        ...


@dataclass(slots=True, eq=False)
class Row:
    """One text for one model. ``tokens`` is 0 until it has been tokenized; ``tokenizer`` is the hash of what did it."""

    owner: Owner = field(repr=False)
    index: int
    model: str
    text: object = field(repr=False)  # what a caller sends never enters a log
    truncate: bool = False
    feeder: Feeder = TOPIC
    version: str | None = None
    """The model version that has to answer; None: the one that new work is routed to."""
    trace: Mapping[str, str] = field(default_factory=dict)
    arrived_s: float = field(default_factory=time.monotonic)
    encoded: Encoded | None = field(default=None, repr=False)
    tokens: int = 0
    tokenizer: str = ""
    waiting: bool = False
    is_suspect: bool = False
    deaths: int = 0
    late: int = 0

    @property
    def alive(self) -> bool:
        """Whether somebody still waits for this row."""
        return self.owner.alive

    def finish(self, outcome: Outcome) -> None:
        """Give the row's outcome to its owner; a suspicion ends here."""
        if self.is_suspect:
            self.owner.suspect(self.index, None)
        self.owner.finish(self.index, outcome)

    def mark_suspect(self, deaths: int = 0) -> None:
        """Put the row under suspicion: from now on it runs alone."""
        self.is_suspect = True
        self.deaths += deaths
        self.owner.suspect(self.index, self.deaths)
