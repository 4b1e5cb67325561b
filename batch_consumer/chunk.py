"""One claimed chunk: the owner of its rows from the claim until its part is written, or until it is somebody else's."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from batch_consumer.chunk_rows import ChunkRow
from batch_consumer.parts import unanswered
from batch_consumer.rows import Outcome, Row
from batch_consumer.turns import job_feeder
from jobs.records import Claim, Suspect
from jobs.states import Status


class ClaimLostError(Exception):
    """The chunk belongs to another claim by now."""


class Chunk:
    """A claim with what has come of it so far. Answers stay in memory until the part is written."""

    def __init__(self, claim: Claim, noticed: Callable[[], None]) -> None:
        """``noticed`` is called when there may be room for another chunk."""
        self.claim = claim
        self.claimed_s = time.monotonic()
        self.rows: Sequence[ChunkRow] = ()
        self.missing = claim.plan.row_count
        """Rows without an answer."""
        self.changed = asyncio.Event()
        self.alive = claim.status.runs
        self.is_lost = False
        self.is_completing = False
        """Set once the ledger was told that the chunk is done: from then on only its answer decides."""
        self.ending: Status | None = None if claim.status.runs else claim.status
        self.suspects = dict(claim.suspects)
        self.remember = False
        """Set when the ledger has to be told of the suspects."""
        self.in_lane = False
        self.is_resting = False
        """Set while it waits because it was claimed so often: it holds nothing but its claim."""
        self._noticed = noticed
        self._half = claim.plan.row_count // 2
        self._outcomes: list[Outcome | None] = [None] * claim.plan.row_count
        self._lane_rows: dict[int, Row] = {}
        self._frozen = False

    # -- what the lane needs -------------------------------------------------------------------------------------------

    def load(self, rows: Sequence[ChunkRow]) -> list[Row]:
        """Take the rows that were read; returns those that the model has to answer."""
        self.rows = rows
        claim, feeder = self.claim, job_feeder(self.claim.tenant, self.claim.weight, self.claim.chunk.job)
        for index, row in enumerate(rows):
            if row.error is not None:
                self.finish(index, row.error)
        if not self.alive:
            return []
        for index, row in enumerate(rows):
            if row.error is None:
                made = Row(self, index, claim.model, row.text, claim.truncate, feeder, claim.model_version)
                if (suspect := claim.suspects.get(index)) is not None:
                    made.is_suspect, made.deaths, made.late = True, suspect.deaths, suspect.attempts
                self._lane_rows[index] = made
        self.in_lane = True
        return list(self._lane_rows.values())

    def finish(self, index: int, outcome: Outcome) -> None:
        """Take the outcome of one row; a second one, or one that comes when the part is written, changes nothing."""
        if self._frozen or self._outcomes[index] is not None:
            return
        self._outcomes[index] = outcome
        self._lane_rows.pop(index, None)
        self.missing -= 1
        if not self.missing:
            self.changed.set()
        if self.missing in (0, self._half):
            self._noticed()

    def suspect(self, index: int, deaths: int | None) -> None:
        """Remember in the chunk row that this row is under suspicion, or forget it."""
        if deaths is None:
            # A forgotten acquittal costs one lone run, so it needs no statement of its own.
            self.suspects.pop(index, None)
            return
        row = self._lane_rows.get(index)
        self.suspects[index] = Suspect(attempts=row.late if row is not None else 0, deaths=deaths)
        self.remember = True
        self.changed.set()

    # -- what happens to the claim ---------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether each row has its answer, or needs none any more."""
        return not self.missing or self.ending is not None

    @property
    def is_full(self) -> bool:
        """Whether most of its rows still wait: then it counts towards the bound of its job."""
        return not self.is_settled and not self.is_resting and self.missing > self._half

    def end(self, status: Status, message: str | None = None) -> None:
        """The job no longer runs: rows without an answer get their one line without the model."""
        if self.ending is None and not self._frozen:
            self.ending, self.alive = status, False
            if message is not None:
                self.claim = replace(self.claim, error_message=message)
            self.changed.set()

    def lose(self) -> None:
        """The chunk is another claim's. Where the ledger has been told that it is done, its answer decides instead."""
        if not self.is_completing:
            self.is_lost, self.alive = True, False
            self.changed.set()

    def stop(self) -> None:
        """Let no further row start; what runs may still finish."""
        self.alive = False

    def freeze(self) -> list[Outcome]:
        """Return one outcome for each row; what comes later is ignored."""
        self._frozen, self.in_lane, self.alive = True, False, False
        self._lane_rows.clear()
        rest = unanswered(self.claim, self.ending or Status.FAILING)
        return [rest if outcome is None else outcome for outcome in self._outcomes]
