"""What the sections plan and compute before anything runs: calls an arm, shares of the CPU, texts of a length, copies."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.copies import copy_name, write_copy
from benchmarks.load import LoadResult, poisson
from benchmarks.machine import cores
from benchmarks.plan import FULL, LONG, SECTIONS, SHORT
from benchmarks.run import MEASURES
from benchmarks.sections.growth import joined
from benchmarks.sections.mix import Run, _figures, _Rows, calls_share, steps
from benchmarks.topic import made_by
from serving.preprocess import Encoded


def test_every_section_of_the_plan_can_be_measured() -> None:
    assert sorted(MEASURES) == sorted(SECTIONS)


def test_the_long_mix_has_1500_calls_an_arm_over_three_runs_and_500_in_each() -> None:
    mix = LONG.mixes[0]
    assert (mix.calls_per_s, mix.runs) == (6.0, 3)
    calls = [
        sum(len(poisson(mix.calls_per_s, mix.seconds, number * mix.rounds + place)) for place in range(mix.rounds))
        for number in range(mix.runs)
    ]
    assert min(calls) >= 500
    assert sum(calls) >= 1_500
    assert LONG.mixes[1] == FULL.mixes[1]


def test_every_arm_of_the_short_mix_has_calls() -> None:
    mixes = [*SHORT.mixes, SHORT.lanes]
    assert all(
        len(poisson(mix.calls_per_s, mix.seconds, seed)) >= 3 for mix in mixes for seed in range(mix.runs * mix.rounds)
    )


def a_run(latencies_ms: list[float], rows: float, *, dry: bool = False) -> Run:
    calls = LoadResult(1.0, np.array(latencies_ms), np.zeros(len(latencies_ms)))
    return Run([calls], [calls], _Rows(100.0, 1.0), _Rows(rows, 1.0), calls_wall_s=1.0, ran_dry=dry)


def test_the_mix_has_the_medians_of_its_runs_and_the_percentiles_of_all_their_calls() -> None:
    runs = [a_run([1.0] * 99 + [slowest], 95.0) for slowest in (1.0, 1.0, 100.0)]
    figures = {figure.name: figure for figure in _figures(6.0, runs, 0.0)}
    assert figures["6 calls/s: p99 alone"].runs == tuple(run.ms("alone", 99) for run in runs)
    (pooled,) = figures["6 calls/s: p99 alone, all runs' calls"].runs
    assert pooled == np.percentile([1.0] * 299 + [100.0], 99)
    assert figures["6 calls/s: p99 beside the topic ÷ alone, all runs' calls"].median == 1
    assert figures["6 calls/s: topic with calls ÷ alone, rows/s"].verdict == "met"


def test_a_topic_that_ran_dry_meets_no_bar() -> None:
    figures = {figure.name: figure for figure in _figures(6.0, [a_run([1.0], 100.0, dry=True)], 0.0)}
    assert figures["6 calls/s: topic with calls ÷ alone, rows/s"].verdict == "missed"


def test_a_window_of_the_topic_may_cut_transactions_and_counts_a_standstill() -> None:
    steady = [float(second) for second in range(1, 21) for _ in range(100)]
    for begin_s in (2.0, 2.3, 2.99):
        assert made_by(steady, begin_s + 7.5) - made_by(steady, begin_s) == pytest.approx(750)
    stood_still = [at_s for at_s in steady if not 5 < at_s < 15]
    assert made_by(stood_still, 15.0) - made_by(stood_still, 5.0) == pytest.approx(100)
    assert made_by([], 1.0) == 0


def test_every_plan_has_both_rates_of_calls_and_the_report_three_runs_of_each() -> None:
    for plan in (SHORT, FULL, LONG):
        assert [mix.calls_per_s for mix in plan.mixes] == [6.0, 20.0]
    assert all(mix.runs == 3 for plan in (FULL, LONG) for mix in plan.mixes)


def test_the_calls_own_share_of_the_cpu_leaves_out_what_an_idle_stack_takes() -> None:
    assert calls_share(cpu_s=3.0, wall_s=10.0, idle_cores=0.1) == pytest.approx(0.2 / cores())
    assert calls_share(cpu_s=0.5, wall_s=10.0, idle_cores=0.1) == 0


def test_rows_are_counted_in_whole_seconds() -> None:
    assert steps([10.0, 10.5, 11.2, 13.9], 10.0, 13.5) == [2.0, 1.0, 0.0]
    assert steps([], 10.0, 10.5) == []


def test_neighbouring_texts_are_joined_to_texts_of_a_length() -> None:
    lengths = {"aa": 4, "bb": 9, "cc": 6, "dd": 30}
    rows = [Encoded(np.ones(3 + n, dtype=np.int64)) for n in lengths.values()]
    # 3 tokens of overhead; 16 at most, 12 at least; what does not fit is left out.
    assert joined(tuple(lengths), rows, overhead=3, tokens=16) == ("aa bb",)
    assert joined(tuple(lengths), rows, overhead=3, tokens=20) == ("aa bb",)
    assert joined((), [], 3, 16) == ()


def test_a_copy_of_a_model_and_its_twin_name_each_other_by_the_new_names(tmp_path: Path) -> None:
    for name, other in (("m", "bulk_model"), ("m_bulk", "twin_of")):
        (tmp_path / "from" / name / "1").mkdir(parents=True)
        (tmp_path / "from" / name / "1" / "model.onnx").write_bytes(b"weights")
        named = "m_bulk" if other == "bulk_model" else "m"
        (tmp_path / "from" / name / "config.pbtxt").write_text(
            f'name: "{name}"\nparameters {{ key: "{other}" value {{ string_value: "{named}" }} }}\n'
            "instance_group [ { count: 2 kind: KIND_AUTO } ]\nmodel_warmup [ ]\n"
        )
    write_copy(tmp_path / "from", "m", tmp_path / "to", copy_name("m", 2), whole=False)
    first = (tmp_path / "to" / "m_2" / "config.pbtxt").read_text()
    twin = (tmp_path / "to" / "m_2_bulk" / "config.pbtxt").read_text()
    assert first.startswith('name: "m_2"\n')
    assert '"m_2_bulk"' in first
    assert twin.startswith('name: "m_2_bulk"\n')
    assert '"m_2"' in twin
    assert "model_warmup" not in first + twin
    assert "count: 1 kind: KIND_AUTO" in first
    assert (tmp_path / "to" / "m_2" / "1" / "model.onnx").read_bytes() == b"weights"
    assert copy_name("m", 1) == "m"
