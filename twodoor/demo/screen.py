"""What the demo shows: one line a stage, a table that lives while all entrances are at work, and the closing table."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table

from twodoor.demo.tally import Calls

REFRESH_S = 0.5


@dataclass(slots=True)
class Bulk:
    """One entrance for bulk work: rows handed over, rows answered, and how long that took."""

    rows: int = 0
    answered: int = 0
    seconds: float = 0.0

    @property
    def rows_per_s(self) -> float:
        """Rows answered per second."""
        return self.answered / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Figures:
    """Everything the tables show; filled as the demo goes on."""

    topic: Bulk = field(default_factory=Bulk)
    job: Bulk = field(default_factory=Bulk)
    labelled: Calls = field(default_factory=Calls)
    alone: Calls = field(default_factory=Calls)
    beside: Calls = field(default_factory=Calls)
    accuracy: dict[str, float] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Calls answered, one text each."""
        return sum(len(phase.latencies_ms) for phase in (self.labelled, self.alone, self.beside))

    @property
    def failures(self) -> list[str]:
        """What the calls without an answer said."""
        return self.labelled.failures + self.alone.failures + self.beside.failures


class Screen:
    """Writes to stdout; where that is no terminal, without the live table."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._console = Console(highlight=False)

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(line, markup=False, soft_wrap=True)

    async def live(self, refresh: Callable[[], None]) -> None:
        """Keep the table fresh until cancelled."""
        if not self._console.is_terminal:
            return
        with Live(self.table(), console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                refresh()
                live.update(self.table(), refresh=True)
                await asyncio.sleep(REFRESH_S)

    def close(self) -> None:
        """Print the closing table."""
        self._console.print(self.table())

    def table(self) -> Table:
        """Return the table of what is known by now."""
        figures = self._figures
        table = Table(title="Twodoor: two doors, one model", title_justify="left")
        table.add_column("")
        for heading in ("answered", "rows/s", "p50 ms", "p99 ms", "accuracy"):
            table.add_column(heading, justify="right")
        table.add_row("/predict alone", *_calls(figures.alone), _share(figures, "interactive"))
        table.add_row("/predict beside bulk", *_calls(figures.beside), "")
        for entrance, bulk in (("topic", figures.topic), ("job", figures.job)):
            answered = f"{bulk.answered:,} of {bulk.rows:,}"
            table.add_row(entrance, answered, f"{bulk.rows_per_s:,.0f}", "", "", _share(figures, entrance))
        return table


def _calls(calls: Calls) -> tuple[str, str, str, str]:
    if not calls.latencies_ms:
        return "", "", "", ""
    return f"{len(calls.latencies_ms):,}", "", f"{calls.percentile_ms(50):.1f}", f"{calls.percentile_ms(99):.1f}"


def _share(figures: Figures, door: str) -> str:
    return f"{figures.accuracy[door]:.3f}" if door in figures.accuracy else ""
