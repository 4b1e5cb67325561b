"""Rate limits of `/predict`: rows a second and tenant, counted by the `limits` library in memory or in Redis.

A tenant may send its rate in any second. A single call of more rows than that passes when there is room for one, and
then nothing of the tenant passes until the rate has caught up: on the long run the rate holds, and no call is for ever
too large.
"""

import asyncio
import math
import time
from typing import cast

import structlog
from limits import RateLimitItemPerSecond
from limits.aio.storage import SlidingWindowCounterSupport, Storage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import ConfigurationError, StorageError
from limits.storage import storage_from_string

from gateway.keys import Caller
from serving.errors import ConfigError, RateLimited

log = structlog.get_logger(__name__)

_MEMORY = "async+memory://"
_NAMESPACE = "twodoor"
# What a call may lose to a storage that is slow, and how long a storage that failed is left alone.
_TIMEOUT_S = 0.25
_PAUSE_S = 1.0
_SHORTEST_RETRY_S = 0.05
# Callers come back at whole seconds, so all at once: half a window's rows fit then, wherever in a window that is.
_TOLD_SHARE = 0.5
# Who does not obey is told a time at each try, and moves those of all others: so these are not moved without end.
_LONGEST_LINE_S = 10.0


class RateLimits:
    """Counts what tenants send. A storage that is away limits nobody: the door's own bounds still hold."""

    def __init__(self, storage_url: str = "") -> None:
        self._storage = _open(storage_url or _MEMORY)
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)
        self._away_until_s: float | None = None
        self._told: dict[str, float] = {}

    async def take(self, caller: Caller, rows: int) -> None:
        """Count rows of a call; raises RateLimited with the time after which they fit."""
        if caller.rate_rows_per_s is None or not self._may_ask():
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                wait_s = await self._take(caller.tenant, caller.rate_rows_per_s, rows)
        except (StorageError, TimeoutError, OSError) as exc:
            self._away(exc)
            return
        if self._away_until_s is not None:
            self._away_until_s = None
            log.info("rate limits are counted again")
        if wait_s is not None:
            rate = caller.rate_rows_per_s
            wait_s = self._in_turn_s(caller.tenant, rate, rows, max(wait_s, _SHORTEST_RETRY_S))
            raise RateLimited(f"the key allows {rate:g} rows a second", wait_s, rate)

    def _in_turn_s(self, tenant: str, rate: float, rows: int, wait_s: float) -> float:
        """Return when to come back: after those of the tenant who were refused before, so that they do not all come at once."""
        now_s = time.time()
        at_s = max(now_s + wait_s, self._told.get(tenant, 0.0))
        self._told[tenant] = min(at_s + rows / (rate * _TOLD_SHARE), now_s + max(wait_s, _LONGEST_LINE_S))
        return at_s - now_s

    async def _take(self, tenant: str, rate: float, rows: int) -> float | None:
        """Return None for rows that pass, else the seconds until they would."""
        item, debt = item_of(rate), f"{_NAMESPACE}/{tenant}/debt"
        if await self._storage.get(debt):
            return await self._left_s(debt)
        large = rows > item.amount
        cost = 1 if large else rows
        if not await self._limiter.hit(item, tenant, cost=cost):
            return await self._room_in_s(item, tenant, cost)
        if large and await self._storage.incr(debt, math.ceil(rows / rate)) > 1:
            return await self._left_s(debt)  # another large call was a moment faster
        return None

    async def _left_s(self, key: str) -> float:
        return await self._storage.get_expiry(key) - time.time()

    async def _room_in_s(self, item: RateLimitItemPerSecond, tenant: str, cost: int) -> float:
        """Return when the weighted count has fallen so far that ``cost`` rows fit."""
        window_s = item.get_expiry()
        counted = await cast("SlidingWindowCounterSupport", self._storage).get_sliding_window(
            item.key_for(tenant), window_s
        )
        previous, previous_left_s, current, current_left_s = counted
        below = item.amount - cost + 1  # the library rounds the weighted count down
        if previous and current < below:
            return previous_left_s - (below - current) * window_s / previous
        # The window that runs has to become the previous one, and then to fade.
        faded_s = window_s * (1 - below / current) if current else 0.0
        return current_left_s - window_s + max(0.0, faded_s)

    def _may_ask(self) -> bool:
        return self._away_until_s is None or time.monotonic() >= self._away_until_s

    def _away(self, error: Exception) -> None:
        if self._away_until_s is None:
            log.warning("rate limits are not counted: their storage is away", error=type(error).__name__)
        self._away_until_s = time.monotonic() + _PAUSE_S


def item_of(rate_rows_per_s: float) -> RateLimitItemPerSecond:
    """Return whole rows in a window of whole seconds, the shortest that keeps the rate within 1 %."""
    window_s = max(1, math.floor(1 / rate_rows_per_s))
    while True:
        amount = round(rate_rows_per_s * window_s)
        if amount and abs(amount / window_s - rate_rows_per_s) <= rate_rows_per_s / 100:
            return RateLimitItemPerSecond(amount, window_s, _NAMESPACE)
        window_s += 1


def _open(url: str) -> Storage:
    scheme = url.partition("://")[0]
    try:
        storage = storage_from_string(url, wrap_exceptions=True)
    except (ConfigurationError, ValueError) as exc:
        raise ConfigError(
            f"TWODOOR_GATEWAY_LIMITS_STORAGE_URL: {scheme}:// cannot be used; "
            "async+redis:// needs the package coredis, and without the setting this process counts alone"
        ) from exc
    if not isinstance(storage, Storage) or not isinstance(storage, SlidingWindowCounterSupport):
        raise ConfigError(f"TWODOOR_GATEWAY_LIMITS_STORAGE_URL: {scheme}:// cannot be used, only async+redis://")
    return storage
