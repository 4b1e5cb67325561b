"""A job's results as a flow: a streamed answer that is taken up again at its byte where the connection breaks.

The results of a job that has ended never change, and the finished prefix of one that runs only grows: so a byte's
place stays its place, and no row is lost or comes twice.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar
from urllib.parse import urlencode

import httpx

from twodoor import errors
from twodoor.job_flows import job_path
from twodoor.job_records import ResultRow
from twodoor.wire import (
    Emit,
    Flow,
    Outcome,
    Patience,
    Read,
    Send,
    Wait,
    bad_answer,
    from_problem,
    positive,
    without_answer,
)

T_co = TypeVar("T_co", covariant=True)

_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")


class Cutter(Protocol[T_co]):
    """Makes items of the answer's bytes."""

    def feed(self, piece: bytes) -> Iterable[T_co]:
        """Return what a piece completes."""
        ...

    def end(self) -> None:
        """Say that the answer has come to its end; raises BadAnswer where it may not end here."""
        ...


class Pieces:
    """The bytes themselves."""

    def feed(self, piece: bytes) -> Iterable[bytes]:
        """Return the piece."""
        return (piece,)

    def end(self) -> None:
        """Bytes may end anywhere."""


class Lines:
    """One result for each line."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, piece: bytes) -> Iterable[ResultRow]:
        """Return the rows whose lines end in this piece."""
        *ended, rest = piece.split(b"\n")
        if ended:
            ended[0] = b"".join([*self._rest, ended[0]])
            self._rest = []
        self._rest.append(rest)
        return [self._row(line) for line in ended]

    def end(self) -> None:
        """Raise BadAnswer unless the last line was whole."""
        if any(self._rest):
            raise errors.BadAnswer("the results end inside a line", code="bad_answer")

    def _row(self, line: bytes) -> ResultRow:
        try:
            return ResultRow.of(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise errors.BadAnswer("a line of the results is not in Twodoor's form", code="bad_answer") from exc


def results_flow(
    job_id: str,
    cutter: Cutter[object],
    *,
    only_errors: bool = False,
    partial: bool = False,
    start_byte: int = 0,
    idle_timeout_s: float = 30.0,
    outage_s: float = 30.0,
    on_total: Callable[[int], None] | None = None,
) -> Flow[int]:
    """Emit what the cutter makes of the results from ``start_byte`` on; returns how many bytes they have in all.

    ``idle_timeout_s`` bounds each read. A server that is away is waited for, up to ``outage_s`` since the last byte.
    ``on_total`` is told the size of the whole where the server names it. Raises Conflict before the job's end.
    """
    told = ({"only": "errors"} if only_errors else {}) | ({"partial": "true"} if partial else {})
    path = job_path(job_id, "/results") + (f"?{urlencode(told)}" if told else "")
    at, patience = start_byte, Patience(outage_s)
    positive(idle_timeout_s)
    while True:
        outcome = yield _ask(path, at, idle_timeout_s)
        try:
            skip, total = _begin(outcome, at)
            if total is not None and on_total is not None:
                on_total(total)
            while skip is not None and (piece := _piece((yield Read()))):
                # A server that knows no ranges sends all of it again.
                skip, piece = max(0, skip - len(piece)), piece[skip:]
                if piece:
                    at += len(piece)
                    patience.came()
                for item in cutter.feed(piece):
                    yield Emit(item)
            if total is not None and at != total:
                raise errors.ConnectionLost("the results broke off", code="connection_lost")
            cutter.end()
            return at
        except errors.TwodoorError as error:
            pause_s = patience.pause_s(error)
            if pause_s is None:
                raise
        yield Wait(pause_s)


def _ask(path: str, at: int, timeout_s: float) -> Send:
    # Places are those of the bytes themselves, so nobody may compress them.
    headers = {"Accept": "application/x-ndjson, application/problem+json", "Accept-Encoding": "identity"}
    if at:
        headers["Range"] = f"bytes={at}-"
    return Send(path, b"", headers, timeout_s, "GET", streamed=True)


def _begin(outcome: Outcome, at: int) -> tuple[int | None, int | None]:
    """Return how many bytes to pass over (None: there are no more), and how many there are in all, where it is told."""
    if not isinstance(outcome, httpx.Response):
        raise without_answer(outcome)
    found = _RANGE.fullmatch(outcome.headers.get("Content-Range", ""))
    total = int(found[2]) if found else None
    if outcome.status_code == 200:
        length = outcome.headers.get("Content-Length", "")
        return at, int(length) if length.isdecimal() else None
    if outcome.status_code == 206:
        if found is None or found[1] is None or int(found[1]) != at:
            raise bad_answer(outcome, "the answer is another part of the results than was asked for")
        return 0, total
    if outcome.status_code == 416 and total == at:
        return None, total
    raise from_problem(outcome)


def _piece(outcome: Outcome) -> bytes:
    if not isinstance(outcome, bytes):
        raise without_answer(outcome)
    return outcome
