"""The answer that holds a job's results: its length known before its first byte, ranges of it, streamed from the parts."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.envelope import header
from gateway.metrics import Metrics
from gateway.problems import Problem
from jobs.objects import ObjectMissing, Objects
from jobs.records import Job, Part
from jobs.results import ByteRange, Unsatisfiable, parse_range, plan_results
from serving.errors import DependencyDown, Overloaded

log = structlog.get_logger(__name__)

NDJSON = "application/x-ndjson"
MOST_DOWNLOADS = 32
"""Each holds up to some MB that were read ahead, for as long as its caller likes to take them."""
_RETRY_S = 5.0


class Downloads:
    """The places of results that are sent at one time."""

    def __init__(self, metrics: Metrics, most: int = MOST_DOWNLOADS) -> None:
        self._metrics, self._most = metrics, most
        self._taken = 0

    def take(self) -> None:
        """Take a place; raises Overloaded where there is none."""
        if self._taken >= self._most:
            self._metrics.shed.labels("downloads").inc()
            raise Overloaded("the service sends as many results as it may", _RETRY_S)
        self._taken += 1

    def give_back(self) -> None:
        """Give a place back."""
        self._taken -= 1


async def results_response(
    scope: Scope, objects: Objects, downloads: Downloads, job: Job, parts: Sequence[Part], *, only_errors: bool
) -> Response:
    """Return 200 or 206 with the lines of the parts.

    Raises Problem 416, Overloaded, DependencyDown where the store is away, or ObjectMissing where it has no such part.
    """
    plan = plan_results(parts, only_errors)
    total = plan.total_bytes
    # Lines of a part never change and parts only follow, so the length tells one version from another.
    etag = f'"{job.id}-{"errors" if only_errors else "all"}-{total}"'
    wanted = _wanted(scope, etag, total)
    headers = {"Accept-Ranges": "bytes", "ETag": etag}
    status, length = 200, total
    if wanted is not None:
        headers["Content-Range"] = wanted.header(total)
        status, length = 206, wanted.end - wanted.start
    headers["Content-Length"] = str(length)
    if scope["method"] == "HEAD" or not length:
        return Response(None, status, headers, NDJSON)
    return await _Streamed.begin(plan.stream(objects, wanted), downloads, status, headers, job.id)


def _wanted(scope: Scope, etag: str, total: int) -> ByteRange | None:
    """Return the range to send, None for everything; raises Problem 416. A range of another version is none.

    Only GET knows ranges (RFC 9110 section 14.2): HEAD tells the length of all.
    """
    asked, version = header(scope, b"range"), header(scope, b"if-range")
    if asked is None or scope["method"] != "GET" or (version is not None and version.strip() != etag.encode()):
        return None
    wanted = parse_range(asked.decode("latin-1"), total)
    if isinstance(wanted, Unsatisfiable):
        headers = {"Content-Range": wanted.header(total), "Accept-Ranges": "bytes"}
        detail = f"the results have {total} bytes"
        raise Problem(416, "range_not_satisfiable", detail, field="header Range", limit=total, headers=headers)
    return wanted


class _Streamed(StreamingResponse):
    """A stream that ends the connection where the store fails in the middle: the caller sees that bytes are missing."""

    job_id: str
    pieces: AsyncGenerator[bytes, None]
    downloads: Downloads

    @classmethod
    async def begin(
        cls,
        pieces: AsyncGenerator[bytes, None],
        downloads: Downloads,
        status: int,
        headers: dict[str, str],
        job_id: str,
    ) -> "_Streamed":
        """Read the first piece, so that a store that is away is still an honest answer; then return the response.

        It holds a place until it was sent.
        """
        downloads.take()
        try:
            first = await anext(pieces)
        except BaseException:
            downloads.give_back()
            raise
        made = cls(_chain(first, pieces), status, headers, NDJSON)
        made.job_id, made.pieces, made.downloads = job_id, pieces, downloads
        return made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, and give the place back."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.downloads.give_back()

    async def stream_response(self, send: Send) -> None:
        """Send; where the answer is not finished the server closes the connection."""
        try:
            async with aclosing(self.pieces):
                await super().stream_response(send)
        except (DependencyDown, ObjectMissing) as exc:
            log.warning("results cut: the object store failed in the middle", job=self.job_id, reason=str(exc))


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece
