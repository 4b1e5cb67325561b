"""When refused callers may come back: how fast the door drains, and which room of the next minute is promised already.

Pure: the caller tells the time. An amount is one number for each bound of the door (rows, tokens), always in one order.
"""

import math
from operator import add
from typing import NamedTuple

LONGEST_WAIT_S = 60
"""Who would have to wait longer is told this, and is promised nothing."""

CAUTION = 0.8
"""So much of the measured rate is counted on: callers who come back cost the machine something too."""

Amounts = tuple[float, ...]

_MEMORY_S = 5.0
# A quiet minute or two may have seen other models, other texts or another machine load.
_QUIET_MEMORY_S = 30.0
_TRUSTED_AFTER_S = 0.2
_LEAST = 1e-6  # of an amount: a rate is never nothing
_BINS_PER_S = 4
# A caller who obeys comes at its second, or a little later: then its room is free for anybody.
_GRACE_S = 1.0


class DrainRate:
    """What is answered a second while there is enough work in line, the last seconds of such work counting most.

    A door with little to do answers less than it could, so that time says nothing; and what was measured last holds
    until there is a line again. The longer ago that is, the less it counts beside what is measured then.
    """

    def __init__(self, dimensions: int, busy_from: float) -> None:
        self._busy_from = busy_from
        self._trusted = False
        self._answered: Amounts = (0.0,) * dimensions
        self._since_s: float | None = None
        self._quiet_since_s: float | None = None
        self.busy_s = 0.0
        """Seconds of such work seen, as far as they still count."""

    def held(self, amount: float, now_s: float) -> None:
        """Tell how much (of the first bound) is held from now on."""
        self._count_until(now_s)
        if amount >= self._busy_from:
            if self._quiet_since_s is not None and self.busy_s > _TRUSTED_AFTER_S:
                kept = math.exp((self._quiet_since_s - now_s) / _QUIET_MEMORY_S)
                self._keep(max(_TRUSTED_AFTER_S / self.busy_s, kept))
            self._since_s, self._quiet_since_s = now_s, None
        elif self._since_s is not None:
            self._since_s, self._quiet_since_s = None, now_s

    def answered(self, amounts: Amounts, now_s: float) -> None:
        """Tell what was answered; to be followed by ``held``."""
        if self._since_s is not None:
            self._count_until(now_s)
            self._answered = _plus(self._answered, amounts)

    def per_s(self) -> Amounts | None:
        """Return the rates, None while too little was seen."""
        if not self._trusted:
            self._trusted = self.busy_s >= _TRUSTED_AFTER_S and self._answered[0] >= self._busy_from
        if not self._trusted:
            return None
        return tuple(max(amount, _LEAST) / self.busy_s for amount in self._answered)

    def _count_until(self, now_s: float) -> None:
        if self._since_s is None:
            return
        seconds, self._since_s = now_s - self._since_s, now_s
        self._keep(math.exp(-seconds / _MEMORY_S))
        self.busy_s += seconds

    def _keep(self, share: float) -> None:
        """Let what was seen until now count less."""
        self.busy_s *= share
        self._answered = tuple(amount * share for amount in self._answered)


class Promises:
    """The room promised to callers who were refused, by the quarter of a second at which they may come back."""

    def __init__(self, bounds: Amounts) -> None:
        self._bounds = bounds
        self._due: dict[int, Amounts] = {}

    def claim(self, amounts: Amounts, now_s: float) -> bool:
        """Take a promise that is due for the one who comes now; returns whether there was one.

        Callers look alike, so whoever comes first is taken for one who was told to come.
        """
        self._forget(now_s)
        due = min(self._due, default=None)
        if due is None or due > now_s * _BINS_PER_S:
            return False
        left = tuple(max(0.0, was - amount) for was, amount in zip(self._due[due], amounts, strict=True))
        if left[0]:
            self._due[due] = left
        else:
            del self._due[due]
        return True

    def leave_room(self, held: Amounts, rates: Amounts, wanted: Amounts, now_s: float) -> bool:
        """Return whether all that is promised still fits when the one who comes now is taken as well."""
        if not self._due:
            return True
        return self._fit(wanted, _peaks(self._outlook(held, rates, now_s))[0])

    def make(self, held: Amounts, rates: Amounts, wanted: Amounts, now_s: float, most_ahead: float = math.inf) -> int:
        """Return in how many whole seconds there should be room, and promise it.

        ``most_ahead``: what may be held (of the first bound) before the caller, so that its deadline does not pass in line.
        """
        self._forget(now_s)
        moments = self._outlook(held, rates, now_s)
        peaks = _peaks(moments)
        # Those of one bin may come at its end and those of the next at its beginning: what drains in one is kept free.
        wanted_and_spare = tuple(
            max(amount, min(amount + min(bound / 2, rate / _BINS_PER_S), bound))
            for amount, rate, bound in zip(wanted, rates, self._bounds, strict=True)
        )
        place = 0
        for wait_s in range(1, LONGEST_WAIT_S):
            at = (now_s + wait_s) * _BINS_PER_S
            while place + 1 < len(moments) and moments[place + 1].at <= at:
                place += 1
            ahead = _drained(moments[place], rates, at)
            if ahead[0] <= most_ahead and self._fit(wanted_and_spare, tuple(map(max, ahead, peaks[place + 1]))):
                due = math.floor(at)
                self._due[due] = _plus(self._due[due], wanted) if due in self._due else wanted
                return wait_s
        return LONGEST_WAIT_S

    def _fit(self, wanted: Amounts, held: Amounts) -> bool:
        return all(a + b <= bound for a, b, bound in zip(held, wanted, self._bounds, strict=True))

    def _outlook(self, held: Amounts, rates: Amounts, now_s: float) -> list["_Moment"]:
        """Return what is held now, and after each moment at which promised callers come, if all of them do."""
        moments = [_Moment(now_s * _BINS_PER_S, held)]
        for due, amounts in sorted(self._due.items()):
            at = max(due, moments[0].at)
            moments.append(_Moment(at, _plus(_drained(moments[-1], rates, at), amounts)))
        return moments

    def _forget(self, now_s: float) -> None:
        oldest = (now_s - _GRACE_S) * _BINS_PER_S
        for due in [due for due in self._due if due < oldest]:
            del self._due[due]


class _Moment(NamedTuple):
    """What is held at a time, which is counted in bins."""

    at: float
    held: Amounts


def _plus(one: Amounts, other: Amounts) -> Amounts:
    return tuple(map(add, one, other))


def _drained(moment: _Moment, rates: Amounts, at: float) -> Amounts:
    """Return what is left of a moment's work at a later time, if nobody comes."""
    seconds = (at - moment.at) / _BINS_PER_S * CAUTION
    return tuple(max(0.0, held - rate * seconds) for held, rate in zip(moment.held, rates, strict=True))


def _peaks(moments: list[_Moment]) -> list[Amounts]:
    """Return for each moment the most that is held then or later; one more at the end, of nothing."""
    peaks: list[Amounts] = [(0.0,) * len(moments[0].held)]
    for moment in reversed(moments):
        peaks.append(tuple(map(max, peaks[-1], moment.held)))
    return peaks[::-1]
