"""The example for an autoscaler reads metrics that there are, and lets Triton go down to nothing."""

import re
from typing import Any

import yaml

from batch_consumer.metrics import Metrics as ConsumerMetrics
from gateway.metrics import Metrics as GatewayMetrics
from tests.parts import ROOT


def scaled_object() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "keda" / "triton.yaml").read_text())
    return content


def test_every_metric_the_example_reads_is_one_a_process_shows() -> None:
    consumer = ConsumerMetrics()
    consumer.watch(dict)
    shown = set(re.findall(r"(?m)^# TYPE (\w+)", (GatewayMetrics().render() + consumer.render()).decode()))
    queries = [trigger["metadata"]["query"] for trigger in scaled_object()["spec"]["triggers"]]
    read = {name for query in queries for name in re.findall(r"\btwodoor_\w+", query)}
    assert len(read) >= len(queries)
    assert read <= shown


def test_a_metric_that_shows_nothing_hides_no_other_in_a_sum() -> None:
    """To a consumer without waiting rows there is no backlog, and to PromQL nothing plus the lag is nothing."""
    for trigger in scaled_object()["spec"]["triggers"]:
        query = trigger["metadata"]["query"]
        if "+" in query:
            assert all(re.fullmatch(r"\(.* or vector\(0\)\)", term) for term in query.split(" + "))


def test_triton_may_go_down_to_nothing_and_one_row_brings_it_back() -> None:
    spec = scaled_object()["spec"]
    assert spec["minReplicaCount"] == 0
    assert {trigger["metadata"]["activationThreshold"] for trigger in spec["triggers"]} == {"0"}
