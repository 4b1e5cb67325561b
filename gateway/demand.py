"""Demand for each model, for an autoscaler: what callers ask for now, and what they asked for in vain a moment ago."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.errors import DependencyDown, Overloaded

UNKNOWN = "unknown"


class Demand(Collector):
    """``twodoor_demand_rows{model}``: rows admitted and not yet answered, and rows refused with 503 inside the window.

    A server that is scaled to zero answers nobody, so only the refusals show that it is wanted. A caller who tries again
    counts again. Every known model has a value, also 0; all names nobody knows are ``unknown`` together.
    """

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``window_s``: how long a refusal counts. Without demand every value is 0 again after this time."""
        self._window_s, self._clock = window_s, clock
        self._names: Callable[[], AbstractSet[str]] = frozenset
        self._waiting: dict[str, int] = {}
        self._refused: dict[str, deque[tuple[float, int]]] = {}

    def know(self, names: Callable[[], AbstractSet[str]]) -> None:
        """Say which models there are; asked at each look, so that a model that comes later has a label too."""
        self._names = names

    @contextmanager
    def wanted(self, model: str, rows: int) -> Iterator[None]:
        """Count a call's rows while the block runs, and for the window where it ends with what callers see as 503."""
        self._waiting[model] = self._waiting.get(model, 0) + rows
        try:
            yield
        except (DependencyDown, Overloaded):
            self._refuse(model, rows)
            raise
        finally:
            self._waiting[model] -= rows
            if not self._waiting[model]:
                del self._waiting[model]

    def rows(self) -> Mapping[str, int]:
        """Return model → rows wanted."""
        found = dict.fromkeys(self._names(), 0) | {UNKNOWN: 0}
        for name in list(self._refused):
            found[self._label(name, found)] += self._recent(name)
        for name, rows in self._waiting.items():
            found[self._label(name, found)] += rows
        return found

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the family without values."""
        return [self._family({})]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return a value for each model, as it is now."""
        return [self._family(self.rows())]

    def _refuse(self, model: str, rows: int) -> None:
        # A caller may make up names without end: only known ones are kept apart.
        name = model if model in self._names() else UNKNOWN
        second = float(int(self._clock()))
        times = self._refused.setdefault(name, deque())
        if times and times[-1][0] == second:
            times[-1] = (second, times[-1][1] + rows)
        else:
            times.append((second, rows))
        self._recent(name)

    def _recent(self, name: str) -> int:
        """Return the rows of the window, and forget those before it."""
        times, first_s = self._refused[name], self._clock() - self._window_s
        while times and times[0][0] < first_s:
            times.popleft()
        if not times:
            del self._refused[name]
        return sum(rows for _, rows in times)

    @staticmethod
    def _label(name: str, known: Mapping[str, int]) -> str:
        return name if name in known else UNKNOWN

    @staticmethod
    def _family(rows: Mapping[str, int]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "twodoor_demand_rows",
            "Rows admitted and not yet answered, and rows refused with 503 a moment ago: what an autoscaler reads.",
            labels=("model",),
        )
        for name, count in rows.items():
            family.add_metric((name,), count)
        return family
