"""The job API's calls as flows: submit, ask, wait, list, cancel, and the operator's pause. No input or output here."""

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx

from twodoor import errors
from twodoor.job_bodies import LinesBody, Options
from twodoor.job_records import BulkState, Job
from twodoor.wire import Emit, Flow, Outcome, Patience, Retry, Send, Wait, bad_answer, positive, success, tried

T = TypeVar("T")

JOBS = "/v1/jobs"
BULK = "/v1/admin/bulk"
# How long the server is asked to hold its answer where only the end matters; it may hold it for less.
LONG_WAIT_S = 20.0
# How much longer than the wait it was asked for the server may take to answer.
_WAIT_GRACE_S = 10.0
_POLL_S = 0.2
# What is waited for after each of the operator's calls; None: it only asks.
_SETTLED = {"pause": {"paused"}, "resume": {"running"}, None: {"paused", "running"}}
_BROKEN_FORM = (ValueError, KeyError, TypeError, AttributeError)


def submit_flow(
    content: bytes | LinesBody, options: Options, key: str, timeout_s: float, retry: Retry, request_id: str | None
) -> Flow[Job]:
    """Submit; each try has the same idempotency key, so that they make one job.

    ``timeout_s`` bounds each read and write, and how long tries go on after the first failure.
    """
    positive(timeout_s)
    headers = {"Accept": "application/json", "Idempotency-Key": key}
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    if isinstance(content, bytes):
        path, headers["Content-Type"] = JOBS, "application/json"
    else:
        path = f"{JOBS}?{_query(options)}"
        headers |= content.headers
    ends: float | None = None
    tries = 0
    while True:
        outcome = yield Send(path, content, headers, timeout_s)
        tries += 1
        try:
            return _job(success(outcome, 202, 200))
        except errors.TwodoorError as error:
            ends = ends or time.monotonic() + timeout_s
            wait_s = retry.wait_s(error, tries, ends - time.monotonic())
            if wait_s is None:
                raise
        yield Wait(wait_s)


def get_flow(job_id: str, timeout_s: float, retry: Retry) -> Flow[Job]:
    """Ask for a job."""
    return (yield from tried(_get(job_path(job_id)), _read_job, positive(timeout_s), retry))


def watch_flow(job_id: str, every_s: float, timeout_s: float | None, outage_s: float) -> Flow[Job]:
    """Emit the job at once, then about every ``every_s`` until it has ended; returns it.

    A server that is away or overloaded is waited for, up to ``outage_s`` at a time: the job goes on without it.
    """
    ends = math.inf if timeout_s is None else time.monotonic() + positive(timeout_s)
    patience, hold_s = Patience(outage_s), 0.0
    while True:
        headers = {"Accept": "application/json"} | ({"Prefer": f"wait={int(hold_s)}"} if hold_s >= 1 else {})
        asked_at = time.monotonic()
        outcome = yield Send(job_path(job_id), b"", headers, hold_s + _WAIT_GRACE_S, "GET")
        now = time.monotonic()
        try:
            job = _read_job(outcome)
        except errors.TwodoorError as error:
            pause_s = patience.pause_s(error, ends)
            if pause_s is None:
                raise
            yield Wait(pause_s)
            continue
        patience.came()
        yield Emit(job)
        if job.ended:
            return job
        if now >= ends:
            raise errors.DeadlineExceeded(f"{job.id} is still {job.status}", code="deadline_exceeded")
        # A server that holds the question for less than it was asked is not asked faster for it.
        early_s = min(asked_at + hold_s - now, 1.0)
        hold_s = max(0.05, min(every_s, ends - now))
        rest_s = early_s if hold_s >= 1 else hold_s
        if rest_s > 0:
            yield Wait(rest_s)


def list_flow(status: str | None, page_rows: int, timeout_s: float, retry: Retry) -> Flow[None]:
    """Emit the jobs, newest first, page by page."""
    after: str | None = None
    while True:
        members = {"limit": str(page_rows)}
        if status is not None:
            members["status"] = status
        if after is not None:
            members["after"] = after
        jobs, after = yield from tried(_get(f"{JOBS}?{urlencode(members)}"), _read_page, positive(timeout_s), retry)
        for job in jobs:
            yield Emit(job)
        if after is None:
            return


def cancel_flow(job_id: str, timeout_s: float, retry: Retry) -> Flow[Job]:
    """Begin to cancel; a job that has ended stays as it is."""

    def read(outcome: Outcome) -> Job:
        return _job(success(outcome, 200, 202))

    return (yield from tried(_post(job_path(job_id, "/cancel")), read, positive(timeout_s), retry))


def delete_flow(job_id: str, timeout_s: float, retry: Retry) -> Flow[None]:
    """Delete a job that has ended, with its results."""
    asked = 0

    def read(outcome: Outcome) -> None:
        nonlocal asked
        asked += 1
        try:
            success(outcome, 204)
        except errors.NotFound:
            # The try before may have deleted it, and its answer was lost.
            if asked == 1:
                raise

    return (yield from tried(_get(job_path(job_id), "DELETE"), read, positive(timeout_s), retry))


def bulk_flow(verb: str | None, wait_s: float | None, timeout_s: float, retry: Retry) -> Flow[BulkState]:
    """Pause or resume bulk work, or (None) ask how it is; with ``wait_s`` ask on until it is so, or raise DeadlineExceeded."""
    asked = _get(BULK)
    state = yield from tried(_post(f"{BULK}/{verb}") if verb else asked, _read_bulk, positive(timeout_s), retry)
    if wait_s is None:
        return state
    wanted, ends = _SETTLED[verb], time.monotonic() + wait_s
    while state.state not in wanted:
        if time.monotonic() >= ends:
            raise errors.DeadlineExceeded(f"bulk work is still {state.state}", code="deadline_exceeded")
        yield Wait(min(_POLL_S, max(0.01, ends - time.monotonic())))
        state = yield from tried(asked, _read_bulk, timeout_s, retry)
    return state


def job_path(job_id: str, rest: str = "") -> str:
    """Return the path of a job; whatever the id is, it stays one segment."""
    if not job_id or job_id in (".", ".."):
        raise ValueError(f"{job_id!r} is no job id")
    return f"{JOBS}/{quote(job_id, safe='')}{rest}"


def _get(path: str, method: str = "GET") -> Callable[[float], Send]:
    return lambda left_s: Send(path, b"", {"Accept": "application/json"}, left_s, method)


def _post(path: str) -> Callable[[float], Send]:
    # Some proxies refuse a POST that does not say how long it is.
    return lambda left_s: Send(path, b"", {"Accept": "application/json", "Content-Length": "0"}, left_s)


def _query(options: Options) -> str:
    told: dict[str, str] = {}
    for name, value in options.members().items():
        told[name] = json.dumps(value) if isinstance(value, dict | bool) else str(value)
    return urlencode(told)


def _job(response: httpx.Response) -> Job:
    replayed = response.headers.get("Idempotent-Replayed", "").lower() == "true"
    try:
        return Job.of(response.json(), replayed=replayed, request_id=response.headers.get("X-Request-Id"))
    except _BROKEN_FORM as exc:
        raise bad_answer(response) from exc


def _read_job(outcome: Outcome) -> Job:
    return _job(success(outcome))


def _read_page(outcome: Outcome) -> tuple[list[Job], str | None]:
    response = success(outcome)
    try:
        body: Mapping[str, Any] = response.json()
        jobs = [Job.of(job) for job in body["data"]]
        following = str(body["next"]) if body["has_more"] else None
    except _BROKEN_FORM as exc:
        raise bad_answer(response) from exc
    return jobs, following


def _read_bulk(outcome: Outcome) -> BulkState:
    response = success(outcome, 200, 202)
    try:
        body = response.json()
        return BulkState(str(body["state"]), [dict(one) for one in body["consumers"]])
    except _BROKEN_FORM as exc:
        raise bad_answer(response) from exc
