"""When a consumer counts as stalled."""

from types import SimpleNamespace
from typing import Any

import pytest

from batch_consumer.app import _sight
from batch_consumer.watchdog import Sight, Watchdog


def look(watchdog: Watchdog, now_s: float, progress: int = 5, lag: int | None = 10, waits: bool = False) -> bool:
    return watchdog.look(Sight(progress, lag, waits), now_s)


def test_lag_without_progress_for_the_stall_time_is_a_stall_and_progress_ends_it() -> None:
    watchdog = Watchdog(10.0, now_s=0.0)
    assert not look(watchdog, 1.0)
    assert not look(watchdog, 10.9)
    assert look(watchdog, 11.0)
    assert watchdog.stalled
    assert not look(watchdog, 12.0, progress=6)
    assert not watchdog.stalled


@pytest.mark.parametrize("lag", [0, None])
def test_without_lag_or_without_knowing_it_there_is_no_stall(lag: int | None) -> None:
    watchdog = Watchdog(10.0, now_s=0.0)
    assert not any(look(watchdog, float(second), lag=lag) for second in range(100))


def test_waiting_for_a_model_that_is_away_is_no_stall_but_standing_still_after_it_is() -> None:
    watchdog = Watchdog(10.0, now_s=0.0)
    assert not any(look(watchdog, float(second), waits=True) for second in range(100))
    assert look(watchdog, 200.0)


@pytest.mark.parametrize(
    ("topic_lag", "chunk_rows", "lag"), [(None, 0, None), (5, 0, 5), (None, 7, 7), (0, 0, 0), (5, 7, 12)]
)
def test_rows_of_jobs_are_lag_too_and_chunks_done_are_progress(
    topic_lag: int | None, chunk_rows: int, lag: int | None
) -> None:
    lane: Any = SimpleNamespace(progress=3, waits_for_model=lambda: False, has_work=lambda: True)
    topic: Any = SimpleNamespace(lag=topic_lag, reads_nothing=False)
    parts: Any = SimpleNamespace(progress=SimpleNamespace(records=10))
    jobs: Any = SimpleNamespace(chunks=SimpleNamespace(progress=100, rows_in_lane=chunk_rows))
    assert _sight(lane, topic, parts, jobs) == Sight(113, lag, waits=False)
    assert _sight(lane, topic, parts, None) == Sight(13, topic_lag, waits=False)
