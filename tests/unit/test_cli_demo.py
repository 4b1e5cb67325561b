"""The demo's own parts: its sentences, the text it finds, and the count that decides whether it says ok."""

import json
import math
from pathlib import Path

import pytest

from twodoor.demo import docs_text, sentences
from twodoor.demo.job import write_lines
from twodoor.demo.tally import Calls, Records, Verdict, accuracy, miscounted

GOOD = {"label": "positive", "score": 0.9}


def test_the_labelled_sentences_are_200_different_ones_half_of_each() -> None:
    rows = sentences.load()
    assert len({row.text.casefold() for row in rows}) == 200
    assert sum(row.label == "positive" for row in rows) == 100
    assert all(row.text.isprintable() and 3 <= len(row.text.split()) <= 40 for row in rows)


def test_the_installed_packages_give_thousands_of_sentences_the_same_ones_each_time() -> None:
    found = docs_text.collect(4_000)
    assert len(found) == 4_000
    assert found == docs_text.collect(4_000)
    assert len({text.casefold() for text in found}) == 4_000
    assert all(docs_text.is_prose(text) for text in found)


def test_markup_code_and_lists_do_not_get_into_a_sentence() -> None:
    text = """
Heading here
============

A *good* library for :class:`~pkg.Thing` objects, see [the guide](https://example.test/x). It has two
parts that work together well.

- The first one reads all of your files.
- The second one writes them back again.

```python
This is code and it should not be here.
```

.. note:: This is a directive which is left out.

:param x: This is a field which is left out.
See https://example.test/ for more words here. | a | table | row |
"""
    assert list(docs_text.sentences(text)) == [
        "A good library for pkg.Thing objects, see the guide.",
        "It has two parts that work together well.",
        "The first one reads all of your files.",
        "The second one writes them back again.",
    ]


@pytest.mark.parametrize(
    "text",
    ["Too few words.", "no capital at the beginning.", "No end of a sentence here", "Tabs\tare not printable here.",
     "A = b + c / d - 5 is not prose.", "Word " * 70 + "end."],
)  # fmt: skip
def test_what_is_no_prose_is_left_out(text: str) -> None:
    assert not docs_text.is_prose(text)


def records() -> Records:
    return Records({"a": "text a", "b": "text b"})


SAID = {"text a": Verdict("positive", 0.9), "text b": Verdict("positive", 0.9)}


def test_each_id_once_and_the_same_at_both_doors_is_no_problem() -> None:
    counted = records()
    for row_id in ("a", "b"):
        assert not counted.complete
        counted.add({"id": row_id, "output": GOOD})
    assert counted.complete
    assert counted.problems(SAID) == []


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        ([{"id": "a", "output": GOOD}], "1 records without a result (b, …)"),
        ([{"id": "a", "output": GOOD}, *[{"id": "b", "output": GOOD}] * 2], "1 records answered more than once (b, …)"),
        (
            [{"id": each, "output": GOOD} for each in "abc"],
            "1 results of records that were not sent (c, …)",
        ),
        (
            [{"id": "a", "output": GOOD}, {"id": "b", "error": {"code": "model_failed"}}],
            "1 records with an error for an answer (b: model_failed, …)",
        ),
        (
            [{"id": "a", "output": GOOD}, {"id": "b", "output": {"label": "negative", "score": 0.9}}],
            "1 records answered otherwise than by /predict (b, …)",
        ),
        (
            [{"id": "a", "output": GOOD}, {"id": "b", "output": {"label": "positive", "score": 0.89}}],
            "1 records answered otherwise than by /predict (b, …)",
        ),
    ],
)
def test_what_is_not_exactly_once_or_not_the_same_is_named(results: list[dict[str, object]], problem: str) -> None:
    counted = records()
    for result in results:
        counted.add(result)
    assert counted.problems(SAID) == [problem]


def test_a_text_that_predict_never_answered_cannot_pass_as_the_same() -> None:
    counted = records()
    for row_id in ("a", "b"):
        counted.add({"id": row_id, "output": GOOD})
    assert counted.problems({"text a": SAID["text a"]}) == ["1 records answered otherwise than by /predict (b, …)"]


def test_percentiles_are_of_what_was_measured() -> None:
    calls = Calls(latencies_ms=[float(number) for number in range(100, 0, -1)])
    assert (calls.percentile_ms(50), calls.percentile_ms(99), calls.percentile_ms(100)) == (50.0, 99.0, 100.0)
    assert Calls(latencies_ms=[7.0]).percentile_ms(50) == 7.0
    assert math.isnan(Calls().percentile_ms(50))


def test_a_missing_answer_counts_against_the_accuracy() -> None:
    assert accuracy([("positive", Verdict("positive", 0.9)), ("negative", None)]) == 0.5


def counts(total: int, failed: int = 0) -> dict[str, int]:
    return {"total": total, "succeeded": total - failed, "failed": failed, "pending": 0}


def test_a_job_is_counted_rightly_when_its_counts_are_those_of_its_lines() -> None:
    assert miscounted(counts(3, failed=1), [(0, False), (1, True), (2, False)], 3) == []


@pytest.mark.parametrize("indexes", [[0, 1], [0, 1, 1], [0, 2, 1], [0, 1, 2, 3], [1, 2, 3], []])
def test_lines_that_are_not_one_for_each_row_in_order_are_named(indexes: list[int]) -> None:
    found = miscounted(counts(len(indexes)), [(index, False) for index in indexes], 3)
    assert any("not one for each of its 3 rows, in order" in problem for problem in found)


def test_counts_that_are_not_those_of_the_lines_are_named() -> None:
    (found,) = miscounted(counts(2), [(0, False), (1, True)], 2)
    assert "'succeeded': 2" in found
    assert "'succeeded': 1" in found


def test_the_jobs_rows_are_called_so(tmp_path: Path) -> None:
    rows = Records({"a": "text a", "b": "text\u2028b"}, "rows of the job")
    rows.add({"id": "a", "output": GOOD})
    assert rows.problems(SAID) == ["1 rows of the job without a result (b, …)"]
    write_lines(tmp_path / "rows.jsonl", rows.texts)
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == [{"id": "a", "text": "text a"}, {"id": "b", "text": "text\u2028b"}]
