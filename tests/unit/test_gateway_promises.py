"""Callers who obey their Retry-After get their answer on the next try: a simulated door and a simulated herd."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import pytest

from gateway.admission import Admission, Lease
from gateway.metrics import Metrics
from gateway.promises import LONGEST_WAIT_S, DrainRate, Promises
from serving.errors import Overloaded

BATCH = 16


@dataclass
class House:
    """A door before a model that answers ``rows_per_s``, in batches, in a time that wavers; all on one simulated clock."""

    rows_per_s: float
    max_rows: int = 1_024
    max_tokens: int = 65_536
    waver: float = 0.4
    jitter_s: float = 0.0
    now_s: float = 0.0
    tries: dict[int, Counter[str]] = field(default_factory=dict)
    longest_wait_s: float = 0.0

    def __post_init__(self) -> None:
        self._admission = Admission(self.max_tokens, Metrics(), max_rows=self.max_rows, clock=lambda: self.now_s)
        self._random = random.Random(7)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._line: list[Lease] = []
        self._works = False

    def herd(self, callers: int, within_s: float, tokens: tuple[int, int] = (20, 120)) -> None:
        """Let so many come within a time, and come back exactly when they are told; returns when all have their answer."""
        for _ in range(callers):
            reserved = self._random.randint(*tokens)
            self._at(self._random.random() * within_s, self._come(0, reserved))
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        assert (self._admission.rows, self._admission.tokens) == (0, 0)

    def _at(self, after_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._order), event))

    def _come(self, number: int, reserved: int) -> Callable[[], None]:
        def come() -> None:
            counts = self.tries.setdefault(number, Counter())
            try:
                lease = self._admission.admit(reserved)
            except Overloaded as exc:
                counts["refused"] += 1
                wait_s = ceil(exc.retry_after_s)
                self.longest_wait_s = max(self.longest_wait_s, wait_s)
                self._at(wait_s + self._random.random() * self.jitter_s, self._come(number + 1, reserved))
                return
            counts["answered"] += 1
            lease.shrink(reserved // 4)
            self._line.append(lease)
            self._work()

        return come

    def _work(self) -> None:
        if self._works or not self._line:
            return
        self._works = True
        batch, self._line = self._line[:BATCH], self._line[BATCH:]
        seconds = len(batch) / self.rows_per_s * self._random.uniform(1 - self.waver, 1 + self.waver)

        def done() -> None:
            self._works = False
            for lease in batch:
                lease.drop()
            self._work()

        self._at(seconds, done)


@pytest.mark.parametrize(
    ("house", "callers"),
    [
        (House(400), 3_000),
        (House(400, jitter_s=0.5), 3_000),
        (House(100), 2_000),
        (House(2_000), 4_000),
        (House(400, max_rows=200), 1_000),
        (House(400, max_rows=10**6, max_tokens=20_000), 2_500),
    ],
    ids=[
        "two cores",
        "who come a little late",
        "a slow machine",
        "a fast one",
        "a small bound",
        "tokens are the bound",
    ],
)
def test_95_of_100_callers_who_come_exactly_when_told_are_taken(house: House, callers: int) -> None:
    house.herd(callers, within_s=0.5)
    assert house.tries[0]["refused"] >= callers // 10
    assert house.tries[1]["answered"] >= 0.95 * house.tries[0]["refused"]


def test_a_herd_is_through_soon_after_the_models_could_have_done_it() -> None:
    house = House(400)
    house.herd(3_000, within_s=0.5)
    assert house.now_s <= 3_000 / 400 * 1.3
    assert house.longest_wait_s <= 3_000 / 400


def test_the_rate_is_what_is_answered_while_there_is_a_line() -> None:
    rate = DrainRate(2, busy_from=10)
    assert rate.per_s() is None
    for tenth in range(100):  # quiet: nothing to learn
        rate.answered((1, 20), tenth / 10)
        rate.held(2, tenth / 10)
    assert rate.per_s() is None
    rate.held(50, 20.0)
    for tenth in range(1, 31):
        rate.answered((5, 100), 20 + tenth / 10)
        rate.held(50, 20 + tenth / 10)
    assert rate.per_s() == pytest.approx((50, 1_000), rel=0.05)
    rate.held(1, 23.0)
    assert rate.per_s() == pytest.approx((50, 1_000), rel=0.05)
    rate.held(50, 1_000.0)  # and an hour later that is still what is known, until it is measured again
    for tenth in range(1, 201):
        rate.answered((1, 20), 1_000 + tenth / 10)
        rate.held(50, 1_000 + tenth / 10)
    assert rate.per_s() == pytest.approx((10, 200), rel=0.1)


def test_who_would_have_to_wait_too_long_is_told_the_longest_time_and_promised_nothing() -> None:
    promises = Promises((10.0,))
    told = [promises.make((10.0,), (1.0,), (1.0,), 0.0) for _ in range(100)]
    assert told[-1] == LONGEST_WAIT_S
    assert told == sorted(told)


def test_a_promise_can_be_claimed_when_it_is_due_and_not_before_and_not_twice() -> None:
    promises = Promises((10.0,))
    wait_s = promises.make((10.0,), (5.0,), (2.0,), 0.0)
    assert not promises.claim((2.0,), wait_s - 0.5)
    assert promises.claim((2.0,), wait_s)
    assert not promises.claim((2.0,), wait_s)
