"""When a consumer counts as stalled."""

import pytest

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
