"""The metric that says which parts a process reaches; both doors show it."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class DependencyGauge(Collector):
    """``twodoor_dependency_up{dependency}``: the values of ``/readyz``, asked for whenever somebody reads the metrics."""

    def __init__(self, dependencies: Callable[[], Mapping[str, bool]]) -> None:
        self._dependencies = dependencies

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the family without values: the registry asks before the parts are known."""
        return [self._family({})]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return a value for each part this process uses."""
        return [self._family(self._dependencies())]

    @staticmethod
    def _family(states: Mapping[str, bool]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "twodoor_dependency_up", "1 while the process reaches the part, else 0.", labels=("dependency",)
        )
        for name, is_up in states.items():
            family.add_metric((name,), float(is_up))
        return family
