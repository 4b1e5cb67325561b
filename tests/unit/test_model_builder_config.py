"""config.pbtxt as the builder writes it, read back with Triton's own message."""

import dataclasses

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from model_builder.config import ModelConfig, default_cores, render, warm_lengths
from serving.models import bucket_length, check_twin, parse_spec

CONFIG = ModelConfig(
    name="mood",
    task="classify",
    output="logits",
    output_size=3,
    max_tokens=512,
    prompt_prefix="query: ",
    tokenizer_sha256="ab" * 32,
    labels=("bad", "so so", "good"),
    cores=2,
)


def parsed(config: ModelConfig, *, bulk: bool) -> model_config_pb2.ModelConfig:
    return text_format.Parse(render(config, bulk=bulk), model_config_pb2.ModelConfig())


def as_mapping(message: model_config_pb2.ModelConfig) -> dict[str, object]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


@pytest.mark.parametrize(
    ("bulk", "name", "rows", "priority"),
    [(False, "mood", 64, "PRIORITY_MAX"), (True, "mood_bulk", 32, "PRIORITY_MIN")],
)
def test_each_lane_has_its_priority_and_one_single_threaded_instance_for_each_core(
    bulk: bool, name: str, rows: int, priority: str
) -> None:
    config = parsed(CONFIG, bulk=bulk)
    assert (config.name, config.platform, config.max_batch_size) == (name, "onnxruntime_onnx", rows)
    assert model_config_pb2.ModelOptimizationPolicy.ModelPriority.Name(config.optimization.priority) == priority
    assert [(group.count, group.kind) for group in config.instance_group] == [
        (CONFIG.cores, model_config_pb2.ModelInstanceGroup.KIND_AUTO)
    ]
    assert config.parameters["intra_op_thread_count"].string_value == "1"


def test_the_first_model_names_its_twin_and_the_twin_its_first() -> None:
    assert parsed(CONFIG, bulk=False).parameters["bulk_model"].string_value == "mood_bulk"
    twin = parsed(CONFIG, bulk=True)
    assert twin.parameters["twin_of"].string_value == "mood"
    assert "bulk_model" not in twin.parameters


@pytest.mark.parametrize("bulk", [False, True])
def test_no_lane_has_a_lone_instance_whose_queue_triton_would_poll(bulk: bool) -> None:
    assert parsed(dataclasses.replace(CONFIG, cores=1), bulk=bulk).instance_group[0].count == 2


@pytest.mark.parametrize("bulk", [False, True])
def test_every_queue_is_bounded_and_a_request_may_shorten_its_timeout(bulk: bool) -> None:
    policy = parsed(CONFIG, bulk=bulk).dynamic_batching.default_queue_policy
    assert policy.max_queue_size > 0
    assert policy.allow_timeout_override
    assert policy.default_timeout_microseconds == 60_000_000
    assert policy.timeout_action == model_config_pb2.ModelQueuePolicy.REJECT


def test_the_doors_read_the_config_and_accept_its_twin() -> None:
    spec = parse_spec(as_mapping(parsed(CONFIG, bulk=False)), "1", CONFIG.labels)
    assert (spec.task, spec.max_tokens, spec.prompt_prefix) == ("classify", 512, "query: ")
    assert (spec.inputs, spec.output, spec.output_size) == (("input_ids", "attention_mask"), "logits", 3)
    check_twin(spec, as_mapping(parsed(CONFIG, bulk=True)))
    assert (spec.priority("interactive"), spec.priority("bulk")) == (0, 0)
    assert not spec.lanes_are_equals


def test_without_a_twin_callers_go_first_in_one_queue_and_bulk_work_waits_in_a_bounded_level_behind() -> None:
    config = parsed(dataclasses.replace(CONFIG, has_twin=False), bulk=False)
    batching = config.dynamic_batching
    assert (batching.priority_levels, batching.default_priority_level) == (2, 1)
    assert sorted(batching.priority_queue_policy) == [1, 2]
    assert batching.priority_queue_policy[2].max_queue_size == 64
    spec = parse_spec(as_mapping(config), "1", CONFIG.labels)
    assert (spec.bulk_model, spec.triton_name("bulk")) == ("mood", "mood")
    assert (spec.priority("interactive"), spec.priority("bulk")) == (1, 2)
    assert spec.lanes_are_equals
    assert spec.bulk_batch_ms == 25


@pytest.mark.parametrize("prefix", ['say "this": ', "C:\\temp ", "frage: schön 🚀 ", "line\nbreak\t", ""])
def test_any_prompt_prefix_comes_back_unchanged(prefix: str) -> None:
    config = parsed(dataclasses.replace(CONFIG, prompt_prefix=prefix), bulk=False)
    assert config.parameters["prompt_prefix"].string_value == prefix


def test_an_embedder_has_no_label_file() -> None:
    config = parsed(dataclasses.replace(CONFIG, task="embed", output="embedding", labels=()), bulk=False)
    assert config.output[0].label_filename == ""
    assert parsed(CONFIG, bulk=False).output[0].label_filename == "labels.txt"


@pytest.mark.parametrize("max_tokens", [40, 128, 256, 500, 512])
def test_every_length_a_single_text_is_padded_to_is_warmed(max_tokens: int) -> None:
    padded = {min(bucket_length(tokens), max_tokens) for tokens in range(1, max_tokens + 1)}
    assert set(warm_lengths(max_tokens)) == padded


@pytest.mark.parametrize("bulk", [False, True])
def test_for_a_gpu_every_length_is_warmed_with_many_rows_too(bulk: bool) -> None:
    config = parsed(dataclasses.replace(CONFIG, for_gpu=True), bulk=bulk)
    shapes = [(entry.batch_size, entry.inputs["input_ids"].dims[0]) for entry in config.model_warmup]
    assert {length for rows, length in shapes if rows > 1} == set(warm_lengths(512))
    assert all(rows * length <= 2048 for rows, length in shapes)


@pytest.mark.parametrize("bulk", [False, True])
def test_for_a_cpu_a_short_warm_up_keeps_the_start_short_and_fits_the_model(bulk: bool) -> None:
    config = parsed(CONFIG, bulk=bulk)
    shapes = [(entry.batch_size, entry.inputs["input_ids"].dims[0]) for entry in config.model_warmup]
    assert {rows for rows, _ in shapes} == {1, 16}
    assert sum(rows * length for rows, length in shapes) <= 2048
    narrow = parsed(dataclasses.replace(CONFIG, max_tokens=32), bulk=bulk)
    assert max(entry.inputs["input_ids"].dims[0] for entry in narrow.model_warmup) == 32
    assert all(set(entry.inputs) == {"input_ids", "attention_mask"} for entry in config.model_warmup)


def test_a_model_uses_four_cores_at_most() -> None:
    assert 1 <= default_cores() <= 4
