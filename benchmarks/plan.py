"""How long and how often each thing is measured: the full report, and the short one that only shows that all works."""

from dataclasses import dataclass, replace

SECTIONS = ("perf", "predict", "open", "topic", "job", "mix", "lanes", "gap", "growth", "herd", "stream", "cold")


@dataclass(frozen=True, slots=True)
class MixPlan:
    """Calls at one rate beside a saturated topic: in each of ``runs``, ``rounds`` of calls alone, then with bulk."""

    calls_per_s: float
    runs: int
    rounds: int
    seconds: float
    """How long the calls come in each arm of a round."""
    bulk_s: float
    """How long the topic runs without calls in each round."""
    settle_s: float = 1.0
    """How long the topic is saturated before anything beside it is measured."""


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """What is made larger, and from where. Each factor says how many times."""

    rounds: int
    rows: int
    rows_factor: int
    callers: int
    callers_factor: int
    models: int
    tokens: int
    tokens_factor: int
    seconds: float
    """How long each closed loop runs."""


@dataclass(frozen=True, slots=True)
class HerdPlan:
    """Callers at once, callers over the bound, open connections."""

    rounds: int
    callers: int
    bound: int | None
    """The bound of rows where callers come back; None = the default."""
    over_bound: int
    connections: int
    beside: int
    """Calls of one caller beside the open connections."""
    seconds: float
    """How long each closed loop before and after runs."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Texts on one WebSocket: at fixed moments, and always as many unanswered ones as this."""

    texts_per_s: float
    rounds: int
    seconds: float
    unanswered: int
    settle_s: float = 1.0
    """How long the topic is saturated before texts come."""


@dataclass(frozen=True, slots=True)
class ColdPlan:
    """Cold starts: in each round one for each of the first ``arms`` ways."""

    rounds: int
    arms: int
    alone: bool
    """Whether gateway and Triton are also started anew each by itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of one run of the report. A round has each arm once; rounds alternate their arms."""

    whole_copies: bool
    """Whether stacks of a section's own have the models as built; if not, with one instance each and no warm-up."""
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
    loop_shapes: int
    """How many shapes of the plain loop are tried before the best ones take turns with topic and job."""
    long_tail_rows: int
    """Texts whose lengths have a long tail, for the topic and the job."""
    job_passes: int
    """How often a job of the `job` section holds each text: its fixed costs, such as closing, are seconds' fractions."""
    mixes: tuple[MixPlan, ...]
    lanes: MixPlan
    """Callers and bulk work on two lanes and on one queue with priorities, each in a stack of its own."""
    mix_backlog: int
    mix_idle_s: float
    """How long the stack is watched while nothing is asked of it."""
    gap_rounds: int
    gap_s: float
    perf_callers: tuple[int, ...]
    perf_rounds: int
    perf_window_ms: int
    growth: GrowthPlan
    herd: HerdPlan
    cold: ColdPlan
    stream: StreamPlan


FULL = Plan(
    whole_copies=True,
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
    loop_shapes=9,
    long_tail_rows=1_600,
    job_passes=2,
    mixes=(
        MixPlan(6.0, runs=3, rounds=2, seconds=16.0, bulk_s=8.0),
        MixPlan(20.0, runs=3, rounds=2, seconds=8.0, bulk_s=6.0),
    ),
    lanes=MixPlan(6.0, runs=3, rounds=1, seconds=20.0, bulk_s=8.0),
    mix_backlog=2_000,
    mix_idle_s=5.0,
    gap_rounds=2,
    gap_s=5.0,
    perf_callers=(1, 8, 32),
    perf_rounds=2,
    perf_window_ms=2_000,
    growth=GrowthPlan(
        rounds=3,
        rows=600,
        rows_factor=10,
        callers=10,
        callers_factor=10,
        models=4,
        tokens=16,
        tokens_factor=8,
        seconds=4.0,
    ),
    herd=HerdPlan(rounds=3, callers=1_000, bound=None, over_bound=2_000, connections=10_000, beside=100, seconds=4.0),
    stream=StreamPlan(texts_per_s=20.0, rounds=3, seconds=16.0, unanswered=32),
    cold=ColdPlan(rounds=5, arms=2, alone=True),
)
LONG = replace(
    FULL,
    mixes=(
        # At least 500 calls in each arm of a run and 1,500 in all three: their 99th percentile stands on fifteen calls.
        MixPlan(6.0, runs=3, rounds=3, seconds=30.0, bulk_s=6.0),
        FULL.mixes[1],
    ),
)
"""As FULL, with the mix at 6 calls/s long enough for its percentiles."""
SHORT = Plan(
    whole_copies=False,
    rows=96,
    callers=(1, 32),
    predict_rounds=1,
    predict_s=0.6,
    warm_s=0.2,
    open_rates_per_s=(20.0,),
    open_s=0.6,
    open_rounds=1,
    topic_rounds=1,
    topic_trial_rows=32,
    loop_shapes=1,
    long_tail_rows=32,
    job_passes=1,
    mixes=(
        MixPlan(6.0, runs=1, rounds=1, seconds=1.0, bulk_s=1.0, settle_s=0.2),
        MixPlan(20.0, runs=1, rounds=1, seconds=1.0, bulk_s=1.0, settle_s=0.2),
    ),
    lanes=MixPlan(6.0, runs=1, rounds=1, seconds=1.0, bulk_s=1.0, settle_s=0.2),
    mix_backlog=120,
    mix_idle_s=0.3,
    gap_rounds=1,
    gap_s=0.6,
    perf_callers=(8,),
    perf_rounds=1,
    perf_window_ms=500,
    growth=GrowthPlan(
        rounds=1,
        rows=16,
        rows_factor=4,
        callers=2,
        callers_factor=8,
        models=2,
        tokens=16,
        tokens_factor=8,
        seconds=0.3,
    ),
    herd=HerdPlan(rounds=1, callers=60, bound=20, over_bound=60, connections=200, beside=5, seconds=0.4),
    stream=StreamPlan(texts_per_s=20.0, rounds=1, seconds=1.0, unanswered=8, settle_s=0.2),
    cold=ColdPlan(rounds=1, arms=1, alone=False),
)
