"""The report: ratios within a round, bars, files that programs can read, pictures."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peer_figures, report
from benchmarks.bench import Section
from benchmarks.callers import Expected
from benchmarks.corpus import accuracy, read_texts, read_tsv
from benchmarks.ort_loop import LoopJob, _batches, _tensors
from benchmarks.perf_analyzer import read_table, write_input
from benchmarks.pictures import draw
from benchmarks.plain_loop import loop_shapes
from benchmarks.sections.gap import TEXT_CHARS, long_text
from benchmarks.stack import running_stack
from benchmarks.stats import Bar, Figure, paired_difference, paired_ratio, percentile
from benchmarks.topic import TopicRun
from serving.errors import ConfigError

HEADER = report.Header(
    started_at="2026-01-01T00:00:00+00:00",
    short=True,
    machine={
        "cpu": "some CPU",
        "cores": 2,
        "memory_gib": 8,
        "kernel": "6",
        "python": "3.11",
        "packages": {"numpy": "2"},
        "commit": "none",
    },
    load_before={"load_1min": 0.1, "cpu_share": 0.01, "memory_free_gib": 4.0},
    stack="one of its own",
    texts="10 of SST-2",
    accuracy=0.9,
    seconds=12.0,
)


def test_a_ratio_compares_the_arms_of_one_round_and_keeps_the_spread() -> None:
    figure = paired_ratio("a ÷ b", [10.0, 30.0, 21.0], [20.0, 40.0, 30.0], Bar(0.6))
    assert figure.runs == (0.5, 0.75, 0.7)
    assert (figure.low, figure.median, figure.high) == (0.5, 0.7, 0.75)
    assert figure.verdict == "met"
    with pytest.raises(ValueError, match="longer"):
        paired_ratio("a ÷ b", [1.0], [1.0, 2.0])


def test_a_difference_is_taken_round_by_round_too() -> None:
    figure = paired_difference("added", "ms", [3.0, 5.0], [1.0, 2.0], Bar(2.5, at_least=False))
    assert figure.runs == (2.0, 3.0)
    assert figure.verdict == "met"


def test_a_bar_is_missed_where_nothing_was_measured() -> None:
    assert Figure("x", "ms", (3.0,), Bar(2.0, at_least=False)).verdict == "missed"
    assert Figure("x", "ms", (1.5,), Bar(2.0, at_least=False)).verdict == "met"
    assert Figure("x", "ms", (), Bar(2.0)).verdict == "missed"
    assert math.isnan(percentile([], 50))


def sections() -> list[Section]:
    two = [[1.0, 2.0], [2.0, 3.0]]
    arm = {"per_s": two, "p50_ms": two, "p99_ms": two, "curves_ms": [two, two]}
    predict = Section(
        "predict", "Predict", [Figure("ratio", "ratio", (0.7, 0.8), Bar(0.6))], ["a note"], others_cpu=[0.2]
    )
    predict.data = {"callers": [1, 32], "curve_percents": [50, 99], "gateway": arm, "direct": arm}
    predict.check("32 callers", Counter({"wrong label": 3}))
    open_loop = Section("open", "Open", data={"rates": [5.0], "percents": [50, 99], "runs": [two]})
    topic = Section(
        "topic", "Topic", data={"topic": [1.0], "loops": {"1 x 2": [2.0]}, "trials": {"1 x 2": 2.0, "2 x 1": 1.0}}
    )
    job = Section("job", "Job", data={"job": [1.0], "topic": [1.0]})
    calls = {"at_s": [1.0], "ms": [2.0]}
    time = {"spans": [["alone", 0.0, 1.0], ["beside", 1.0, 2.0]], "alone": calls, "beside": calls, "rows_per_s": [0, 9]}
    rate = {"alone_ms": [1.0, 2.0], "beside_ms": [2.0], "topic_alone": [1.0], "topic_shared": [1.0], "time": time}
    mix = Section("mix", "Mix", data={"6": rate, "20": rate})
    gap = Section("gap", "Gap", [Figure("quiet: largest", "ms", (4.0,))], data={"quiet": {"at_s": [0.0], "ms": [1.0]}})
    perf = Section("perf", "Perf", notes=["not measured: no binary"])
    growth = Section("growth", "Growth", data={"ratios": {"rows x 10": [0.9, 1.0]}})
    stream = Section("stream", "Stream", data={"alone_ms": [1.0], "beside_ms": [2.0]})
    return [perf, predict, open_loop, topic, job, mix, gap, growth, stream]


def test_json_table_and_pictures_are_written_and_tell_what_was_wrong(tmp_path: Path) -> None:
    parts = sections()
    names = draw(parts, tmp_path)
    assert names == [f"{name}.png" for name in ("predict", "open", "topic", "job", "mix", "gap", "growth", "stream")]
    report.write(tmp_path, HEADER, parts, names)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["sections"][1]["figures"][0]["runs"] == [0.7, 0.8]
    assert content["sections"][1]["errors"] == ["32 callers: 3 x wrong label"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    table = (tmp_path / "report.md").read_text()
    assert "| ratio | 0.75 | 0.70 to 0.80 | 2 | ≥ 0.6: met |" in table
    assert "Other programs took at most 20% of all cores" in table
    assert "**wrong:** 32 callers: 3 x wrong label" in table
    assert "![predict](predict.png)" in table
    assert not list(tmp_path.glob("*.part"))


def test_a_section_without_a_picture_of_its_own_shows_its_figures_as_bars(tmp_path: Path) -> None:
    other = Section("other", "Other", [Figure("first answer", "s", (2.0, 3.0)), Figure("share", "%", ())])
    assert draw([other, Section("empty", "Empty")], tmp_path) == ["other.png"]


def test_servers_of_a_run_of_peers_stand_in_the_report_with_a_picture(tmp_path: Path) -> None:
    callers = {"32": {"per_s": [1.0, 2.0], "p50_ms": [3.0], "p99_ms": [4.0, 5.0]}}
    content = {"arms": [{"name": "litserve", "callers": callers}, {"name": "twodoor", "callers": callers}]}
    (tmp_path / "peers.json").write_text(json.dumps(content))
    peers = peer_figures.read(tmp_path / "peers.json")
    peer_figures.draw(peers, tmp_path / "peers.png")
    report.write(tmp_path, HEADER, [], ["peers.png"], peers)
    table = (tmp_path / "report.md").read_text()
    assert "| twodoor | - | 1.50 (1.00 to 2.00) |" in table
    assert table.endswith("![peers](peers.png)\n")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert peer_figures.read(tmp_path / "absent.json") == []


def test_the_screen_shows_every_bar_the_gap_and_what_was_not_measured() -> None:
    lines = report.summary(HEADER, sections())
    assert lines == [
        "ratio: 0.75 (0.70 to 0.80), bar ≥ 0.6: met",
        "quiet: largest: 4.00 ms (4.00 to 4.00)",
        "this is the short run: it shows that all works, its figures say nothing about speed",
        "beware: other programs took up to 20% of all cores during a run",
        "perf: not measured: no binary",
        "wrong: predict: 32 callers: 3 x wrong label",
    ]


def test_a_figure_that_is_no_number_becomes_null_in_json(tmp_path: Path) -> None:
    report.write(tmp_path, HEADER, [Section("perf", "Perf", [Figure("x", "ms", ())])], [])
    figure = json.loads((tmp_path / "report.json").read_text())["sections"][0]["figures"][0]
    assert figure["median"] is None


def test_the_topics_rate_runs_from_the_first_record_produced_to_the_last_result() -> None:
    run = TopicRun(begin_s=0.0, arrivals_s=[1.0] * 100 + [2.0] * 100 + [3.0] * 100)
    assert run.rows_per_s == 100
    assert TopicRun(begin_s=0.0, arrivals_s=[2.0] * 10).rows_per_s == 5


def test_every_row_is_in_exactly_one_share_of_the_loop() -> None:
    rows = [np.arange(n + 1) for n in range(70)]
    shares = [_batches(LoopJob("", ("input_ids",), "o", rows, batch=16, share=k, shares=2)) for k in range(2)]
    lengths = sorted(len(row) for share in shares for batch in share for row in batch)
    assert lengths == list(range(1, 71))
    tensors = _tensors(LoopJob("", ("input_ids", "attention_mask"), "o", rows), rows[:3])
    assert tensors["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_the_loop_tries_one_process_with_all_cores_and_one_process_a_core() -> None:
    names = [str(shape) for shape in loop_shapes(2)]
    assert len(set(names)) == 9
    assert {(shape.processes, shape.threads) for shape in loop_shapes(2)} == {(1, 2), (2, 1)}
    assert {(shape.processes, shape.threads) for shape in loop_shapes(1)} == {(1, 1)}


def test_perf_analyzer_gets_real_rows_of_the_commonest_length(tmp_path: Path) -> None:
    rows = [{"input_ids": np.full((1, n), 7), "attention_mask": np.ones((1, n), dtype=np.int64)} for n in (16, 32, 32)]
    assert write_input(rows, tmp_path / "rows.json") == (32, 2)
    data = json.loads((tmp_path / "rows.json").read_text())["data"]
    assert data[0]["input_ids"] == {"content": [7] * 32, "shape": [32]}


def test_perf_analyzers_table_is_read_in_milliseconds(tmp_path: Path) -> None:
    head = "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p99 latency"
    (tmp_path / "t.csv").write_text(f"{head}\n8,250.5,1,2,3000,100,1800,100,5,30000,45000\n")
    row = read_table(tmp_path / "t.csv")
    assert (row.callers, row.per_s, row.p50_ms, row.p99_ms, row.queue_ms, row.compute_ms) == (8, 250.5, 30, 45, 3, 2)


def test_sst2_is_read_in_order_and_another_text_serves_without_it(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("good film\t1\nbad , film\t0")
    assert read_tsv(tmp_path / "test.tsv") == [("good film", 1), ("bad , film", 0)]
    assert read_texts(tmp_path, 5).texts == ("good film", "bad , film")
    other = read_texts(tmp_path / "absent", 250)
    assert len(other.texts) == 250
    assert set(other.labels) == {0, 1, None}
    assert "SST-2 is not here" in other.source


def test_accuracy_needs_labels() -> None:
    answers = [Expected(True, 0.9), Expected(False, 0.1)]
    assert accuracy(answers, [1, 1]) == 0.5
    assert accuracy(answers, [1, None]) == 1
    assert accuracy(answers, [None, None]) is None


def test_the_long_text_has_a_million_characters() -> None:
    assert len(long_text(("some words", "und café"))) == TEXT_CHARS


def test_a_stack_on_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="loopback"):
        running_stack("http://example.com:8080")
