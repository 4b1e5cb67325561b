"""Rows a second and tenant: the rate holds on the long run, no call is for ever too large, and a storage that is away limits nobody."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from math import ceil

import pytest
from limits.aio.storage import MemoryStorage
from structlog.testing import capture_logs

from gateway.keys import Caller
from gateway.ratelimit import RateLimits, item_of
from serving.errors import ConfigError, RateLimited


class Clock:
    """The time the storage goes by."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(time, "time", made.time)
    return made


async def passes(limits: RateLimits, caller: Caller, rows: int) -> float | None:
    """None for a call that passes, else when it is told to come back."""
    try:
        await limits.take(caller, rows)
    except RateLimited as exc:
        return exc.retry_after_s
    return None


async def test_what_fits_into_a_second_passes_and_the_next_row_is_told_when_to_come(clock: Clock) -> None:
    limits, caller = RateLimits(), Caller("a", rate_rows_per_s=5)
    for _ in range(5):
        assert await passes(limits, caller, 1) is None
    wait_s = await passes(limits, caller, 1)
    assert wait_s is not None
    assert 0 < wait_s <= 1
    clock.now_s += wait_s + 0.001
    assert await passes(limits, caller, 1) is None


@pytest.mark.parametrize(("already", "rows", "at"), [(5, 5, 0.0), (5, 3, 0.4), (2, 4, 0.9), (4, 5, 0.5)])
async def test_a_call_passes_at_the_moment_it_was_told_and_not_much_before(
    clock: Clock, already: int, rows: int, at: float
) -> None:
    limits, caller = RateLimits(), Caller("a", rate_rows_per_s=5)
    clock.now_s += at
    assert await passes(limits, caller, already) is None
    wait_s = await passes(limits, caller, rows)
    assert wait_s is not None
    clock.now_s += wait_s - 0.05
    assert await passes(limits, caller, rows) is not None
    clock.now_s += 0.051
    assert await passes(limits, caller, rows) is None


async def test_a_call_of_more_rows_than_a_second_allows_passes_and_the_rate_holds_on_the_long_run(clock: Clock) -> None:
    limits, caller = RateLimits(), Caller("a", rate_rows_per_s=10)
    start_s, passed = clock.now_s, 0
    while clock.now_s < start_s + 300:
        wait_s = await passes(limits, caller, 256)
        if wait_s is None:
            passed += 256
        else:
            clock.now_s += wait_s + 0.001
    assert 2_000 <= passed <= 3_000 + 256


async def test_after_a_large_call_small_ones_wait_until_the_rate_has_caught_up(clock: Clock) -> None:
    limits, caller = RateLimits(), Caller("a", rate_rows_per_s=10)
    assert await passes(limits, caller, 100) is None
    wait_s = await passes(limits, caller, 1)
    assert wait_s == pytest.approx(10, abs=0.1)
    assert await passes(limits, Caller("b", rate_rows_per_s=10), 1) is None
    clock.now_s += 10.001
    assert await passes(limits, caller, 1) is None


async def test_a_key_without_a_rate_is_not_counted() -> None:
    limits = RateLimits()
    for _ in range(100):
        assert await passes(limits, Caller("a"), 1_000_000) is None


@pytest.mark.parametrize("rate", [0.001, 0.3333, 0.5, 1, 1.5, 2.25, 7.9, 1000, 123_456.7])
def test_a_rate_becomes_whole_rows_in_whole_seconds(rate: float) -> None:
    item = item_of(rate)
    assert item.amount / item.get_expiry() == pytest.approx(rate, rel=0.0101)


class Failing(MemoryStorage):
    """A storage that can be away or silent; the real one needs a server that no package here brings."""

    STORAGE_SCHEME = ["async+failing"]  # noqa: RUF012 - as the library has it
    away = False
    silent = False

    async def get(self, key: str) -> int:
        if self.silent:
            await asyncio.sleep(60)
        if self.away:
            raise ValueError("connection refused")
        return await super().get(key)


@pytest.mark.parametrize("how", ["away", "silent"])
async def test_a_storage_that_is_away_lets_calls_through_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    limits, caller = RateLimits("async+failing://"), Caller("a", rate_rows_per_s=1)
    monkeypatch.setattr(Failing, how, True)
    with capture_logs() as logs:
        started_s = time.monotonic()
        for _ in range(50):
            assert await passes(limits, caller, 1) is None
        assert time.monotonic() - started_s < 0.9
    assert [entry["log_level"] for entry in logs] == ["warning"]
    monkeypatch.setattr(Failing, how, False)
    limits._away_until_s = 0.0
    assert await passes(limits, caller, 1) is None
    assert await passes(limits, caller, 1) is not None


@pytest.mark.parametrize("url", ["redis://localhost", "memory://", "nonsense"])
def test_a_storage_that_cannot_be_used_stops_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="TWODOOR_GATEWAY_LIMITS_STORAGE_URL"):
        RateLimits(url)


async def test_callers_who_are_refused_together_are_told_to_come_one_after_another_and_pass_then(clock: Clock) -> None:
    limits, caller = RateLimits(), Caller("a", rate_rows_per_s=20)
    clock.now_s += 0.3
    told = [wait_s for _ in range(120) if (wait_s := await passes(limits, caller, 1)) is not None]
    assert len(told) == 100
    comes = Counter(ceil(wait_s) for wait_s in told)
    begin_s, passed = clock.now_s, 0
    for second, callers in sorted(comes.items()):
        clock.now_s = begin_s + second + 0.001
        passed += sum([await passes(limits, caller, 1) is None for _ in range(callers)])
    assert passed >= 95
