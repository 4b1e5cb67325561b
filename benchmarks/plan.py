"""How long and how often each thing is measured: the full report, and the short one that only shows that all works."""

from dataclasses import dataclass

SECTIONS = ("perf", "predict", "open", "topic", "job", "mix", "gap")


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of one run of the report. A round has each arm once; rounds alternate their arms."""

    rows: int
    """Texts used, and so the rows of one pass over the topic and of the plain loop."""
    callers: tuple[int, ...]
    predict_rounds: int
    predict_s: float
    warm_s: float
    open_rates_per_s: tuple[float, ...]
    open_s: float
    open_rounds: int
    topic_rounds: int
    topic_trial_rows: int
    job_passes: int
    """How often a job of the `job` section holds each text: its fixed costs, such as closing, are seconds' fractions."""
    mix_rounds: int
    mix_s: float
    mix_backlog: int
    mix_calls_per_s: float
    gap_rounds: int
    gap_s: float
    perf_callers: tuple[int, ...]
    perf_rounds: int
    perf_window_ms: int


FULL = Plan(
    rows=3_600,
    callers=(1, 8, 32, 128),
    predict_rounds=3,
    predict_s=5.0,
    warm_s=0.7,
    open_rates_per_s=(25.0, 100.0, 200.0),
    open_s=8.0,
    open_rounds=2,
    topic_rounds=3,
    topic_trial_rows=640,
    job_passes=2,
    mix_rounds=4,
    mix_s=16.0,
    mix_backlog=2_000,
    mix_calls_per_s=6.0,
    gap_rounds=2,
    gap_s=5.0,
    perf_callers=(1, 8, 32),
    perf_rounds=2,
    perf_window_ms=2_000,
)
SHORT = Plan(
    rows=128,
    callers=(1, 32),
    predict_rounds=1,
    predict_s=1.0,
    warm_s=0.2,
    open_rates_per_s=(20.0,),
    open_s=1.5,
    open_rounds=1,
    topic_rounds=1,
    topic_trial_rows=32,
    job_passes=1,
    mix_rounds=1,
    mix_s=2.0,
    mix_backlog=200,
    mix_calls_per_s=6.0,
    gap_rounds=1,
    gap_s=1.0,
    perf_callers=(8,),
    perf_rounds=1,
    perf_window_ms=500,
)
