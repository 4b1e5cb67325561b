"""The texts with a long tail, and the copy of a model whose queue serves both lanes."""

from pathlib import Path

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.long_tail import MOST_TOKENS, join
from benchmarks.sections.lanes import write_without_twin
from serving.models import parse_spec
from serving.triton_client import parse_config

BUILT = Path(__file__).resolve().parents[2] / "model_repository"


def test_joined_texts_have_a_long_tail_and_are_the_same_every_time() -> None:
    lengths = [5 + number % 23 for number in range(500)]
    texts = [" ".join(["w"] * length) for length in lengths]
    joined = join(texts, lengths, 2_000)
    assert joined == join(texts, lengths, 2_000)
    tokens = [len(text.split()) for text in joined]
    assert max(tokens) <= MOST_TOKENS
    assert max(tokens) > 200
    assert 20 <= np.percentile(tokens, 50) <= 45
    assert np.percentile(tokens, 95) > 3 * np.percentile(tokens, 50)


def test_the_copy_without_a_twin_serves_both_lanes_and_is_otherwise_the_same_model(tmp_path: Path) -> None:
    source, target = BUILT / "sentiment_model", tmp_path / "sentiment_model"
    labels = (source / "labels.txt").read_text().split()
    spec = parse_spec(parse_config((source / "config.pbtxt").read_text()), "1", labels)
    write_without_twin(source, target, spec)
    text = (target / "config.pbtxt").read_text()
    assert text_format.Parse(text, model_config_pb2.ModelConfig()).dynamic_batching.priority_levels == 2
    copy = parse_spec(parse_config(text), "1", labels)
    assert (copy.bulk_model, copy.bulk_priority, copy.instances) == (spec.name, 2, spec.instances)
    assert (copy.tokenizer_sha256, copy.max_tokens, copy.output) == (
        spec.tokenizer_sha256,
        spec.max_tokens,
        spec.output,
    )
    write_without_twin(source, tmp_path / "quick", spec, whole=False)
    quick = parse_config((tmp_path / "quick" / "config.pbtxt").read_text())
    assert (parse_spec(quick, "1", labels).bulk_model, parse_spec(quick, "1", labels).instances) == (spec.name, 1)
    assert not quick.get("model_warmup")
    assert (target / "1" / "model.onnx").stat().st_size == (source / "1" / "model.onnx").stat().st_size
