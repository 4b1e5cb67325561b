"""A herd: many callers at one moment, each on a connection of its own, who come back when they were told to."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, cast

import uvloop

REFUSED = (429, 503)
FILES_BESIDE = 64
"""Open files of this process that are no callers."""


@dataclass(frozen=True, slots=True)
class Try:
    """One answer. ``status`` 0: none came, and ``fault`` says in a word why. Times are seconds since the herd began."""

    sent_s: float
    done_s: float
    status: int
    retry_after_s: int | None = None
    body: bytes = b""
    fault: str = ""


@dataclass(slots=True)
class Herd:
    """What a herd saw: for each caller its tries, in order."""

    callers: list[list[Try]] = field(default_factory=list)

    def nth(self, number: int) -> list[Try]:
        """Return the answers to everybody's try of that number, from 0."""
        return [tries[number] for tries in self.callers if len(tries) > number]

    def statuses(self, number: int = 0) -> Counter[str]:
        """Count how the tries of one number ended."""
        return Counter(one.fault or str(one.status) for one in self.nth(number))

    @property
    def faults(self) -> Counter[str]:
        """Count what no caller should see: no answer, another status, a refusal that does not say when to come back."""
        found: Counter[str] = Counter()
        for one in (one for tries in self.callers for one in tries):
            if one.fault or one.status not in (200, *REFUSED):
                found[one.fault or f"status {one.status}"] += 1
            elif one.status in REFUSED and one.retry_after_s is None:
                found["no Retry-After"] += 1
        return found

    @property
    def last_s(self) -> float:
        """When the last 200 came, in seconds since the herd began; NaN where there was none."""
        return max((one.done_s for tries in self.callers for one in tries if one.status == 200), default=float("nan"))


class _Caller(asyncio.Protocol):
    """One connection; understands answers with a Content-Length."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.lost = asyncio.Event()
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, int | None, bytes]] | None = None

    async def ask(self, request: bytes) -> tuple[int, int | None, bytes]:
        """Send a request; returns status, Retry-After and body. Raises ConnectionError."""
        assert self.transport is not None
        if self.transport.is_closing():
            raise ConnectionResetError
        self._buffer.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (called by the event loop)."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Collect bytes until the answer is whole (called by the event loop)."""
        self._buffer += data
        head, end, body = bytes(self._buffer).partition(b"\r\n\r\n")
        if not end:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", b"-1"))
        if self._answer is None or self._answer.done() or length < 0 or len(body) < length:
            return
        told = fields.get(b"retry-after")
        self._answer.set_result((int(head[9:12]), int(told) if told is not None else None, body))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the call that waits (called by the event loop)."""
        self.lost.set()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc if isinstance(exc, OSError) else ConnectionResetError())


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to the hard one; returns how many connections it may hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 10**6 if hard == resource.RLIM_INFINITY else hard - FILES_BESIDE


async def call_at_once(
    address: tuple[str, int], requests: Sequence[bytes], timeout_s: float, *, tries: int = 1
) -> Herd:
    """Let one caller for each request dial and send at the same moment.

    A caller who is refused comes back exactly when it was told to, over a new connection, up to ``tries`` in all.
    """
    start_s = time.monotonic()

    async def caller(request: bytes) -> list[Try]:
        seen: list[Try] = []
        while len(seen) < tries:
            seen.append(await _one_try(address, request, start_s, timeout_s))
            wait_s = seen[-1].retry_after_s
            if seen[-1].status not in REFUSED or wait_s is None or len(seen) == tries:
                break
            await asyncio.sleep(wait_s)
        return seen

    return Herd(await asyncio.gather(*map(caller, requests)))


async def _one_try(address: tuple[str, int], request: bytes, start_s: float, timeout_s: float) -> Try:
    sent_s = time.monotonic() - start_s
    connection = _Caller()
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(lambda: connection, *address)
            status, told_s, body = await connection.ask(request)
    except (OSError, TimeoutError) as exc:
        return Try(sent_s, time.monotonic() - start_s, 0, fault=type(exc).__name__)
    finally:
        if connection.transport is not None:
            connection.transport.abort()
    return Try(sent_s, time.monotonic() - start_s, status, told_s, body)


class Crowd:
    """Connections that are open and stay so. Use as a context manager."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._members: list[_Caller] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for member in self._members:
            if member.transport is not None:
                member.transport.abort()
        await asyncio.gather(*(member.lost.wait() for member in self._members))

    async def grow(self, count: int, timeout_s: float) -> None:
        """Open so many connections more, some hundred at a time as a kernel's line of new ones is bounded."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            while count > 0:
                step = min(count, 500)
                made = await asyncio.gather(*(loop.create_connection(_Caller, *self._address) for _ in range(step)))
                self._members += [protocol for _, protocol in made]
                count -= step

    async def ask_all(self, request: bytes, timeout_s: float) -> list[Try]:
        """Send one request on every connection at the same moment, and return the answers in their order."""
        start_s = time.monotonic()

        async def ask(member: _Caller) -> Try:
            sent_s = time.monotonic() - start_s
            try:
                async with asyncio.timeout(timeout_s):
                    status, told_s, body = await member.ask(request)
            except (OSError, TimeoutError) as exc:
                return Try(sent_s, time.monotonic() - start_s, 0, fault=type(exc).__name__)
            return Try(sent_s, time.monotonic() - start_s, status, told_s, body)

        return list(await asyncio.gather(*map(ask, self._members)))

    @property
    def open(self) -> int:
        """How many are still open."""
        return sum(not member.lost.is_set() for member in self._members)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """A job of a load process: a herd with these requests."""

    address: tuple[str, int]
    requests: Sequence[bytes]
    tries: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Crowded:
    """A job of a load process: many connections that rest, one caller beside them, then a call on each of them."""

    address: tuple[str, int]
    connections: int
    requests: Sequence[bytes]
    beside: int
    """Calls of the one caller, one after another."""
    timeout_s: float


@dataclass(slots=True)
class CrowdSeen:
    """What a crowd saw; ``connections`` is how many the file limit allowed."""

    connections: int
    still_open: int
    beside: Herd
    all_at_once: list[Try]


def run_herd(job: AtOnce) -> Herd:
    """Run a herd (in a worker)."""
    raise_file_limit()
    return uvloop.run(call_at_once(job.address, job.requests, job.timeout_s, tries=job.tries))


def run_crowd(job: Crowded) -> CrowdSeen:
    """Run a crowd (in a worker)."""
    connections = min(job.connections, raise_file_limit())

    async def work() -> CrowdSeen:
        async with Crowd(job.address) as crowd:
            await crowd.grow(connections, job.timeout_s)
            beside = Herd()
            for number in range(job.beside):
                request = job.requests[number % len(job.requests)]
                beside.callers += (await call_at_once(job.address, [request], job.timeout_s)).callers
            still_open = crowd.open
            return CrowdSeen(connections, still_open, beside, await crowd.ask_all(job.requests[0], job.timeout_s))

    return uvloop.run(work())
