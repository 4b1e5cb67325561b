"""What a submission may look like, and what each wrong one is told."""

from typing import Any

import pytest

from jobs.forms import JobRequest, import_key, parse_body, parse_query
from serving.errors import EmptyInput, InvalidJob
from serving.settings import JobsSettings

LIMITS = JobsSettings(max_completion_window_s=1000, max_result_ttl_s=2000)


def body(**changed: Any) -> dict[str, Any]:
    return {"model": "m", "inputs": ["a"], **changed}


def test_a_body_may_hold_only_model_and_inputs() -> None:
    assert parse_body(body(), LIMITS) == JobRequest("m", inputs=["a"])


def test_a_body_may_hold_every_option() -> None:
    full = body(truncate=True, metadata={"a": "b"}, completion_window_s=1000, result_ttl_s=1)
    assert parse_body(full, LIMITS) == JobRequest("m", True, {"a": "b"}, 1000, 1, ["a"])


def test_a_body_may_name_an_imported_object() -> None:
    found = parse_body({"model": "m", "input_object": "imports/t/x"}, LIMITS)
    assert (found.inputs, found.input_object) == (None, "imports/t/x")


def test_rows_of_a_wrong_shape_are_no_reason_to_refuse_the_job() -> None:
    rows = [1, None, {"text": 5}, {"id": "\0", "text": "x"}, "\ud800", []]
    assert parse_body(body(inputs=rows), LIMITS).inputs == rows


@pytest.mark.parametrize(
    ("value", "field", "limit"),
    [
        ([], "body", None),
        (None, "body", None),
        (body(inptus=[]), "inptus", None),
        (body(**{"x\r\n" + "y" * 200: 1}), "x??" + "y" * 61, None),
        ({"inputs": ["a"]}, "model", None),
        (body(model=""), "model", 256),
        (body(model="x" * 257), "model", 256),
        (body(model="a\0"), "model", 256),
        (body(model="\ud800"), "model", 256),
        (body(model=5), "model", None),
        (body(inputs="a"), "inputs", None),
        (body(inputs=None), "inputs", None),
        ({"model": "m"}, "inputs", None),
        (body(input_object="imports/t/x"), "inputs", None),
        ({"model": "m", "input_object": 5}, "input_object", None),
        (body(truncate=1), "truncate", None),
        (body(truncate="true"), "truncate", None),
        (body(truncate=None), "truncate", None),
        (body(completion_window_s=True), "completion_window_s", None),
        (body(completion_window_s=1.0), "completion_window_s", None),
        (body(completion_window_s=None), "completion_window_s", None),
        (body(completion_window_s=0), "completion_window_s", 1000),
        (body(completion_window_s=1001), "completion_window_s", 1000),
        (body(result_ttl_s=-1), "result_ttl_s", 2000),
        (body(result_ttl_s=10**30), "result_ttl_s", 2000),
        (body(metadata=[]), "metadata", None),
        (body(metadata={"a": 1}), "metadata", None),
        (body(metadata={str(n): "" for n in range(17)}), "metadata", 16),
        (body(metadata={"k" * 65: ""}), "metadata", 64),
        (body(metadata={"k": "v" * 513}), "metadata", 512),
        (body(metadata={"k": "\0"}), "metadata", None),
        (body(metadata={"\0": "v"}), "metadata", None),
        (body(metadata={"k": "\udfff"}), "metadata", None),
    ],
)
def test_a_wrong_body_names_the_field_and_the_limit(value: Any, field: str, limit: float | None) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_body(value, LIMITS)
    assert (refused.value.field, refused.value.limit) == (field, limit)


def test_no_rows_at_all_is_an_empty_input() -> None:
    with pytest.raises(EmptyInput):
        parse_body(body(inputs=[]), LIMITS)


def test_a_query_holds_the_options_of_a_jsonl_body() -> None:
    pairs = [("model", "m"), ("truncate", "TRUE"), ("metadata", '{"a": "b"}'), ("result_ttl_s", "7")]
    assert parse_query(pairs, LIMITS) == JobRequest("m", True, {"a": "b"}, None, 7)
    assert parse_query([("model", "m"), ("truncate", "false")], LIMITS) == JobRequest("m")


@pytest.mark.parametrize(
    ("pairs", "field"),
    [
        ([], "model"),
        ([("model", "")], "model"),
        ([("model", "m"), ("model", "m")], "model"),
        ([("model", "m"), ("inputs", "x")], "inputs"),
        ([("model", "m"), ("truncate", "yes")], "truncate"),
        ([("model", "m"), ("metadata", "{")], "metadata"),
        ([("model", "m"), ("metadata", "[" * 100_000)], "metadata"),
        ([("model", "m"), ("metadata", '{"a": "\\u0000"}')], "metadata"),
        ([("model", "m"), ("result_ttl_s", "1.5")], "result_ttl_s"),
        ([("model", "m"), ("result_ttl_s", "٣")], "result_ttl_s"),
        ([("model", "m"), ("completion_window_s", "9" * 5000)], "completion_window_s"),
        ([("model", "m"), ("completion_window_s", "1001")], "completion_window_s"),
    ],
)
def test_a_wrong_query_names_the_parameter(pairs: list[tuple[str, str]], field: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_query(pairs, LIMITS)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "name", ["imports/acme/a.jsonl", "imports/acme/2026/april/отчёт 🚀 (1).jsonl", "imports/acme/a#b"]
)
def test_an_import_may_have_any_plain_name_in_its_tenants_folder(name: str) -> None:
    assert import_key("acme", name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a.jsonl",
        "/imports/acme/a",
        "imports/acme",
        "imports/acme/",
        "imports/acme2/a",
        "imports/other/a",
        "imports/acme/../other/a",
        "imports/acme/./a",
        "imports/acme//a",
        "imports/acme/a/",
        "imports/acme/..%2fother/a",
        "imports/acme/a%20b",
        "imports/acme/..\\other",
        "imports/acme/a\0",
        "imports/acme/a\r\nX-Evil: 1",
        "imports/acme/\ud800",
        "imports/acme/" + "a" * 300,
        "imports/acme/" + "a/" * 500 + "a",
        "imports/acme/a.jsonl#1",
        "jobs/job_1/input",
    ],
)
def test_an_import_that_could_mean_another_place_is_refused(name: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        import_key("acme", name)
    assert refused.value.field == "input_object"


@pytest.mark.parametrize("tenant", ["", "..", "a/b", "."])
def test_a_tenant_whose_name_is_no_folder_has_no_imports(tenant: str) -> None:
    with pytest.raises(InvalidJob):
        import_key(tenant, f"imports/{tenant}/a")
