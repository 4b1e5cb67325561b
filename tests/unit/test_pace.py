"""How many micro-batches may be in flight, and how pauses grow."""

from batch_consumer.pace import SUCCESSES_PER_STEP, Backoff, Pace


def test_a_full_queue_halves_the_bound_and_successes_raise_it_step_by_step() -> None:
    pace = Pace(6)
    pace.refused()
    assert pace.limit == 3
    pace.refused()
    pace.refused()
    assert pace.limit == 1
    for _ in range(SUCCESSES_PER_STEP):
        pace.succeeded()
    assert pace.limit == 2
    for _ in range(SUCCESSES_PER_STEP * 10):
        pace.succeeded()
    assert pace.limit == 6


def test_pauses_grow_to_their_bound_and_start_small_again() -> None:
    backoff = Backoff(2.0, first_s=0.1)
    pauses = [backoff.next_s() for _ in range(10)]
    assert 0.05 <= pauses[0] <= 0.1
    assert all(pause <= 2.0 for pause in pauses)
    assert pauses[-1] >= 1.0
    backoff.reset()
    assert backoff.next_s() <= 0.1
