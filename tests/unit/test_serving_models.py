"""What a door accepts as a model's config, and how rows are padded."""

from pathlib import Path
from typing import Any

import pytest

from serving.errors import ConfigError
from serving.models import bucket_length, check_twin, padded_length, parse_spec, tokenizer_sha256


def config(**changes: Any) -> dict[str, Any]:
    """Return a config as Triton tells it (64-bit numbers as strings), with changes."""
    base: dict[str, Any] = {
        "name": "m",
        "max_batch_size": 8,
        "input": [
            {"name": "input_ids", "data_type": "TYPE_INT64", "dims": ["-1"]},
            {"name": "attention_mask", "data_type": "TYPE_INT64", "dims": ["-1"]},
        ],
        "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": ["2"], "label_filename": "labels.txt"}],
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "dynamic_batching": {
            "default_queue_policy": {
                "default_timeout_microseconds": "60000000",
                "allow_timeout_override": True,
                "max_queue_size": 128,
            }
        },
        "optimization": {"priority": "PRIORITY_MAX"},
        "parameters": {
            "task": {"string_value": "classify"},
            "max_tokens": {"string_value": "512"},
            "bulk_model": {"string_value": "m_bulk"},
        },
    }
    return {**base, **changes}


def queue(**policy: Any) -> dict[str, Any]:
    return {"default_queue_policy": policy}


LABELS = ["negative", "positive"]


ONE = {"task": {"string_value": "classify"}, "max_tokens": {"string_value": "512"}, "bulk_model": {"string_value": "m"}}
BOUND = {"default_timeout_microseconds": "60000000", "allow_timeout_override": True, "max_queue_size": 4}


def levels(count: int, default: int, **policies: Any) -> dict[str, Any]:
    batching = {"priority_levels": str(count), "default_priority_level": str(default), "default_queue_policy": BOUND}
    return config(parameters=ONE, dynamic_batching={**batching, "priority_queue_policy": policies})


def test_a_model_that_serves_both_lanes_puts_bulk_on_its_last_level() -> None:
    spec = parse_spec(levels(3, 1), "1", LABELS)
    assert [spec.priority(lane) for lane in ("interactive", "bulk")] == [1, 3]
    assert spec.lanes_are_equals


def test_a_model_that_serves_both_lanes_without_levels_is_kept_to_short_micro_batches_too() -> None:
    spec = parse_spec(config(parameters=ONE, dynamic_batching={"default_queue_policy": BOUND}), "1", LABELS)
    assert spec.bulk_priority == 0
    assert spec.lanes_are_equals


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "25 ms", ""])
def test_a_length_of_micro_batches_that_is_no_number_is_refused_by_name(value: str) -> None:
    found = config(parameters={**ONE, "bulk_batch_ms": {"string_value": value}})
    with pytest.raises(ConfigError, match="model m: parameter bulk_batch_ms"):
        parse_spec(found, "1", LABELS)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (levels(1, 1), "two levels"),
        (levels(2, 2), "level 1"),
        (levels(2, 0), "level 1"),
        (levels(2, 1, **{"2": {**BOUND, "max_queue_size": 0}}), "level 2.max_queue_size"),
        (levels(2, 1, **{"2": {**BOUND, "allow_timeout_override": False}}), "level 2 needs allow_timeout_override"),
    ],
)
def test_levels_that_would_let_bulk_work_pass_for_a_caller_s_are_refused(found: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_spec(found, "1", LABELS)


def test_a_right_config_becomes_a_spec() -> None:
    spec = parse_spec(config(), "3", LABELS)
    assert (spec.name, spec.version, spec.task, spec.max_tokens) == ("m", "3", "classify", 512)
    assert spec.inputs == ("input_ids", "attention_mask")
    assert spec.triton_name("interactive") == "m"
    assert spec.triton_name("bulk") == "m_bulk"
    assert spec.is_sentiment


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dynamic_batching": {}}, "max_queue_size"),
        ({"dynamic_batching": queue(max_queue_size=4, default_timeout_microseconds="5")}, "allow_timeout_override"),
        ({"dynamic_batching": queue(max_queue_size=4, allow_timeout_override=True)}, "default_timeout_microseconds"),
        ({"input": [{"name": "pixels", "data_type": "TYPE_FP32", "dims": ["3"]}]}, "pixels"),
        ({"output": [{"name": "logits", "data_type": "TYPE_FP16", "dims": ["2"]}]}, "TYPE_FP32"),
        ({"output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": ["3"]}]}, "labels"),
        ({"parameters": {"task": {"string_value": "classify"}}}, "max_tokens"),
        ({"parameters": {"task": {"string_value": "translate"}}}, "translate"),
    ],
)
def test_a_wrong_config_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_spec(config(**changes), "1", LABELS)


def test_a_twin_must_be_kept_behind_and_take_the_same_rows() -> None:
    spec = parse_spec(config(), "1", LABELS)
    check_twin(spec, config(name="m_bulk", optimization={"priority": "PRIORITY_MIN"}))
    with pytest.raises(ConfigError, match="PRIORITY_MIN"):
        check_twin(spec, config(name="m_bulk"))
    other = config(name="m_bulk", output=[{"name": "logits", "data_type": "TYPE_FP32", "dims": ["5"]}])
    with pytest.raises(ConfigError, match="differ"):
        check_twin(spec, other)


@pytest.mark.parametrize(("tokens", "length"), [(1, 16), (16, 16), (17, 32), (128, 128), (129, 192), (512, 512)])
def test_single_rows_are_padded_to_few_lengths(tokens: int, length: int) -> None:
    assert bucket_length(tokens) == length


def test_many_rows_are_padded_to_their_longest_on_a_cpu_and_to_a_bucket_on_a_gpu() -> None:
    cpu = parse_spec(config(), "1", LABELS)
    gpu = parse_spec(config(instance_group=[{"kind": "KIND_GPU"}]), "1", LABELS)
    assert padded_length(cpu, [5, 21]) == 21
    assert padded_length(gpu, [5, 21]) == 32
    assert padded_length(cpu, [21]) == 32


def test_a_bucket_never_passes_what_the_model_takes() -> None:
    parameters = {"task": {"string_value": "classify"}, "max_tokens": {"string_value": "140"}}
    spec = parse_spec(config(parameters=parameters), "1", LABELS)
    assert padded_length(spec, [139]) == 140


def test_a_tokenizers_hash_covers_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("1")
    (tmp_path / "b.json").write_text("2")
    first = tokenizer_sha256(tmp_path)
    assert tokenizer_sha256(tmp_path) == first
    (tmp_path / "b.json").rename(tmp_path / "c.json")
    renamed = tokenizer_sha256(tmp_path)
    (tmp_path / "c.json").write_text("3")
    assert len({first, renamed, tokenizer_sha256(tmp_path)}) == 3
