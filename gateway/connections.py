"""The bound of open connections: who rests longest leaves first, and who finds no room is told when to come back."""

import time
from collections.abc import Callable, Collection
from typing import Protocol

from starlette.types import Receive, Scope, Send

from gateway.envelope import Envelope, request_id_of
from gateway.metrics import Metrics
from gateway.problems import problem_of, render
from gateway.promises import DrainRate, Promises
from serving.errors import Overloaded

REFUSAL = "the service has as many open connections as it takes on"
# A connection that has just come, or was just answered, will be used in a moment.
_RESTED_S = 1.0
# How many of those that rest are looked at, where some have not taken all of their last answer.
_TRIES = 8
_FIRST_GUESS_PER_S = 100.0
_RETRY_AFTER = "twodoor.retry_after_s"


class Peer(Protocol):
    """A connection, as far as the bound is concerned."""

    def leave(self) -> bool:
        """Close, and return True; False where something is still to be sent."""


class Connections:
    """Counts one server's connections. ``most`` may be open, and ``most_turned_away`` more until they have their answer.

    ``open_ones`` is the server's own collection, given once it exists: streams and those turned away are in it too.
    """

    def __init__(
        self, most: int, most_turned_away: int, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._most_turned_away = most, most_turned_away
        self._metrics, self._clock = metrics, clock
        self._resting: dict[Peer, float] = {}
        self._turned_away: set[Peer] = set()
        self._rate = DrainRate(1, most)
        self._promises = Promises((most,))
        self._open: Collection[object] = ()
        metrics.connections.set_function(lambda: len(self._open))
        self._refusing = Envelope(_refuse, metrics, lambda path: "other")

    def welcome(self, peer: Peer, open_ones: Collection[object]) -> bool:
        """Take a new connection, in the place of one that rests where need be; returns whether there is room."""
        self._open = open_ones
        now_s = self._clock()
        self._rate.held(self._taken, now_s)
        self._promises.claim((1.0,), now_s)
        if self._taken <= self._most or self._make_room(now_s):
            self._resting[peer] = now_s
            return True
        self._metrics.shed.labels("connections").inc()
        self._turned_away.add(peer)
        return False

    @property
    def crowded(self) -> bool:
        """Whether there is not even room for more of those who only wait for their refusal."""
        return len(self._turned_away) > self._most_turned_away

    def rests(self, peer: Peer) -> None:
        """Note that a connection waits for its next request."""
        if peer not in self._turned_away:
            now_s = self._clock()
            self._resting[peer] = now_s
            self._rate.answered((1.0,), now_s)

    def works(self, peer: Peer) -> None:
        """Note that a connection has a request, or has become something else."""
        self._resting.pop(peer, None)

    def gone(self, peer: Peer) -> None:
        """Note that a connection is closed."""
        self._resting.pop(peer, None)
        self._turned_away.discard(peer)
        now_s = self._clock()
        self._rate.answered((1.0,), now_s)
        self._rate.held(self._taken, now_s)

    def retry_after_s(self) -> float:
        """Return when there should be room for one connection more, and promise it."""
        busy = max(0, self._taken - len(self._resting))
        rates = self._rate.per_s() or (_FIRST_GUESS_PER_S,)
        return self._promises.make((float(min(busy, self._most)),), rates, (1.0,), self._clock())

    async def refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a connection that was turned away (ASGI) with 503."""
        scope[_RETRY_AFTER] = self.retry_after_s()
        await self._refusing(scope, receive, send)

    @property
    def _taken(self) -> int:
        return len(self._open) - len(self._turned_away)

    def _make_room(self, now_s: float) -> bool:
        for _ in range(_TRIES):
            peer, since_s = next(iter(self._resting.items()), (None, now_s))
            if peer is None or now_s - since_s < _RESTED_S:
                return False
            del self._resting[peer]
            if peer.leave():
                return True
            self._resting[peer] = now_s
        return False


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    problem = problem_of(Overloaded(REFUSAL, scope[_RETRY_AFTER]))
    await render(problem, request_id_of(scope))(scope, receive, send)
