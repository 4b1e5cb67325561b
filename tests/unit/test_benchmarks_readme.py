"""The README's table: it holds what was published and nothing else, and what is published holds figures alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.peer_figures import arms, table
from benchmarks.readme import BEGIN, END, NOT_YET, publish, refresh, render


def a_report(**changes: Any) -> dict[str, Any]:
    ratio = {
        "name": "a ÷ b", "unit": "ratio", "median": 1.25004, "low": 1.1, "high": 1.4, "runs": [1.1, 1.25004, 1.4],
        "bar": {"limit": 1.0, "at_least": True}, "verdict": "met", "headline": True,
    }  # fmt: skip
    plain = {
        "name": "a", "unit": "ms", "median": 7.0, "low": 7.0, "high": 7.0, "runs": [7.0],
        "bar": None, "verdict": None, "headline": False,
    }  # fmt: skip
    section = {
        "name": "mix", "title": "Both doors", "figures": [plain, ratio], "notes": ["a note"], "errors": [],
        "others_cpu_share": [0.01, 0.02], "data": {"alone_ms": [1.0, 2.0]},
    }  # fmt: skip
    machine = {
        "cpu": "some CPU", "cores": 2, "memory_gib": 8.0, "commit": "0123456789abcdef+changes",
        "settings": {"TWODOOR_SST2_DIR": "/somewhere/data/sst2", "TWODOOR_LOG_LEVEL": "info"},
    }  # fmt: skip
    return {
        "started_at": "2026-01-02T03:04:05+00:00",
        "short": False,
        "machine": machine,
        "sections": [section],
    } | changes


PEERS = {
    "arms": [
        {"name": "litserve", "config": "2 x 1", "callers": {"1": {"per_s": [50.0]}, "32": {"per_s": [90.0, 110.0], "p99_ms": [200.0]}}},
        {
            "name": "twodoor", "config": "", "callers": {"32": {"per_s": [200.0], "p99_ms": [100.0]}},
            "mix": {
                "alone_p50_ms": 10.0, "bulk_p50_ms": 11.0, "alone_p99_ms": [20.0, 20.0], "bulk_p99_ms": [24.0, 26.0],
                "bulk_rows_per_s_alone": 400.0, "bulk_rows_per_s_shared": 380.0,
            },
        },
    ]
}  # fmt: skip


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_readmes_table_is_what_the_published_results_say() -> None:
    assert refresh(readme.README, readme.PUBLISHED, check=True) == 0


def test_without_published_results_the_table_says_so_and_shows_no_figure(tmp_path: Path) -> None:
    assert render(tmp_path) == NOT_YET


def test_what_is_published_has_figures_and_facts_but_no_samples_and_no_paths(tmp_path: Path) -> None:
    publish(write(tmp_path / "results", report=a_report(), peers=PEERS), tmp_path / "published")
    text = (tmp_path / "published" / "report.json").read_text()
    section = json.loads(text)["sections"]["mix"]
    assert section["figures"][1]["runs"] == [1.1, 1.25, 1.4]
    assert section["machine"]["settings"] == {"TWODOOR_SST2_DIR": "sst2", "TWODOOR_LOG_LEVEL": "info"}
    assert section["others_cpu_share"] == 0.02
    assert "alone_ms" not in text
    assert "somewhere" not in text


def test_the_table_shows_figures_with_a_bar_their_spread_and_the_machine(tmp_path: Path) -> None:
    publish(write(tmp_path / "results", report=a_report(), peers=PEERS), tmp_path / "published")
    lines = render(tmp_path / "published").splitlines()
    assert "some CPU, 2 cores, 8.0 GiB, 2026-01-02, commit 01234567, with changes." in lines[0]
    assert "| **Both doors** | | |" in lines
    assert "| a ÷ b | 1.25 (1.10 to 1.40) | ≥ 1: met |" in lines
    assert not any(line.startswith("| a |") for line in lines)
    assert any(line.startswith("| twodoor | - | 200 |") for line in lines)


def test_what_other_programs_took_meanwhile_stands_above_the_table(tmp_path: Path) -> None:
    busy = a_report()["sections"][0] | {"others_cpu_share": [0.01, 0.2]}
    publish(write(tmp_path / "results", report=a_report(sections=[busy])), tmp_path / "published")
    assert "Other programs took up to 20% of all cores while mix was measured." in render(tmp_path / "published")


def test_a_later_run_replaces_its_own_sections_only(tmp_path: Path) -> None:
    other = a_report()["sections"][0] | {"name": "predict", "title": "Predict"}
    publish(write(tmp_path / "results", report=a_report()), tmp_path / "published")
    publish(write(tmp_path / "results", report=a_report(sections=[other])), tmp_path / "published")
    sections = json.loads((tmp_path / "published" / "report.json").read_text())["sections"]
    assert list(sections) == ["predict", "mix"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"short": True}, "short run"),
        ({"sections": [a_report()["sections"][0] | {"errors": ["32 callers: 3 x wrong label"]}]}, "wrong answers"),
    ],
)
def test_a_short_run_and_one_with_wrong_answers_are_not_published(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        publish(write(tmp_path / "results", report=a_report(**changes)), tmp_path / "published")
    assert render(tmp_path / "published") == NOT_YET


def test_only_what_stands_between_the_marks_is_written_and_a_difference_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert refresh(page, tmp_path, check=True) == 1
    assert "run python -m benchmarks.readme" in capsys.readouterr().err
    assert "old" in page.read_text()
    assert refresh(page, tmp_path, check=False) == 0
    assert page.read_text() == f"before\n{BEGIN}\n{NOT_YET}\n{END}\nafter\n"
    assert refresh(page, tmp_path, check=True) == 0


def test_a_page_without_the_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("nothing here\n")
    with pytest.raises(ValueError, match="once"):
        refresh(page, tmp_path, check=False)


def test_peers_stand_in_one_table_ours_first_and_what_was_not_measured_is_a_dash() -> None:
    loop = {"name": "loop", "title": "plain loop", "config": None, "callers": {}, "mix": {}, "rows_per_s": [500.0]}
    lines = table(arms({"arms": [*PEERS["arms"], loop, {"name": "ray", "errors": ["it did not start"]}]}))
    assert lines[2:] == [
        "| twodoor | - | 200 | - | 100 | 1.10 | 1.25 | 400 | 0.95 |",
        "| litserve (2 x 1) | 50.0 | 100 (90.0 to 110) | - | 200 | - | - | - | - |",
        "| plain loop | - | - | - | - | - | - | 500 | - |",
    ]
