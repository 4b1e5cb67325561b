"""A chunk's rows and outcomes become its result part: one line a row in row order, then the error lines once more. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batch_consumer.chunk_rows import ChunkRow
from batch_consumer.rows import Outcome
from jobs.records import Claim, Done
from jobs.states import Status
from serving.codec import encode_json
from serving.errors import JobCancelled, JobExpired, JobFailed, RowError


@dataclass(frozen=True, slots=True)
class ResultPart:
    """``data`` is what is put; ``ends`` counts rows by ``ok`` or error code."""

    data: bytes
    result_bytes: int
    ends: Counter[str]

    def done(self, key: str) -> Done:
        """Return what the ledger is told."""
        succeeded = self.ends["ok"]
        return Done(
            part_key=key,
            succeeded=succeeded,
            failed=self.ends.total() - succeeded,
            result_bytes=self.result_bytes,
            error_bytes=len(self.data) - self.result_bytes,
        )


def render_part(rows: Sequence[ChunkRow], outcomes: Sequence[Outcome], first_row: int) -> ResultPart:
    """Return the part; ``outcomes`` holds one for each row. Runs in a thread: it holds as much as the chunk's answers."""
    lines: list[bytes] = []
    errors: list[bytes] = []
    ends: Counter[str] = Counter()
    for index, (row, outcome) in enumerate(zip(rows, outcomes, strict=True), first_row):
        line = encode_json(_line(index, row, outcome)) + b"\n"
        lines.append(line)
        if isinstance(outcome, RowError):
            ends[outcome.code] += 1
            errors.append(line)
        else:
            ends["ok"] += 1
    return ResultPart(b"".join([*lines, *errors]), sum(map(len, lines)), ends)


def _line(index: int, row: ChunkRow, outcome: Outcome) -> dict[str, Any]:
    line: dict[str, Any] = {"index": index}
    if row.id is not None:
        line["id"] = row.id
    if isinstance(outcome, RowError):
        line["error"] = {"code": outcome.code, "message": str(outcome)}
        if row.line is not None:
            line["error"]["line"] = row.line
    else:
        line["output"] = outcome.as_json()
    return line


def unanswered(claim: Claim, status: Status) -> RowError:
    """Return what a row gets that had no answer when its job began to end."""
    if status in (Status.CANCELLING, Status.CANCELLED):
        return JobCancelled("the job was cancelled before this row ran")
    if status in (Status.EXPIRING, Status.EXPIRED):
        return JobExpired("the job's completion window ended before this row ran")
    return JobFailed(claim.error_message or "the job failed before this row ran")
