"""The comparison with other servers: how callers speak, which configuration counts, and what the report says."""

import asyncio
import dataclasses
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import orjson
import pytest

from benchmarks.load import LoadResult
from benchmarks.peers import install, report, run
from benchmarks.peers.arms import best_of, triton_config
from benchmarks.peers.catalog import ENVIRONMENTS, LOCKS, PEERS
from benchmarks.peers.measure import Arm, MixRound, Trial, moments_of, topic_as_bulk
from benchmarks.peers.plan import FULL, Config, configs
from benchmarks.peers.server import _start
from benchmarks.peers.servers.common import Settings
from benchmarks.peers.wire import READERS, body_of
from benchmarks.topic import TopicDriver
from serving.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIG = """instance_group [ { count: 2 kind: KIND_AUTO } ]
dynamic_batching {
  default_queue_policy {
    max_queue_size: 512
  }
}
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""


def a_result(per_s: float, latency_ms: float, wrong: Counter[str] | None = None) -> LoadResult:
    calls = round(per_s)
    return LoadResult(1.0, np.full(calls, latency_ms), np.zeros(calls), wrong or Counter())


def an_arm() -> Arm:
    arm = Arm("litserve", "LitServe", "2 processes x 1 thread, batching on", {"litserve": "1.0"})
    arm.trials = [Trial(Config(1, 2, True), 100.0), Trial(Config(2, 1, True), 150.0)]
    arm.callers = {1: [a_result(50, 20.0), a_result(70, 10.0), a_result(60, 30.0)]}
    arm.mix = [MixRound(a_result(6, 10.0), a_result(6, 40.0), 200.0, 100.0)]
    return arm


def a_run(short: bool = False) -> report.Run:
    facts = {"commit": "abc", "cpu": "a processor", "cores": 2, "memory_gib": 8}
    return report.Run("2026-01-01T00:00:00+00:00", 60.0, short, facts, {"cpu_share": 0.01}, "3 texts", FULL)


def test_every_peer_is_tried_with_and_without_batching_in_both_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.plan.cores", lambda: 2)
    found = configs(FULL)
    assert {(config.processes, config.threads, config.batching) for config in found} == {
        (1, 2, True), (2, 1, True), (1, 2, False), (2, 1, False),
    }  # fmt: skip
    assert {config.wait_ms for config in found} == {5, 1, None}
    assert str(found[0]) == "1 process x 2 threads, batching on within 5 ms"
    assert [str(config) for config in configs(FULL, waits=False)][::2] == [
        "1 process x 2 threads, batching on",
        "1 process x 2 threads, batching off",
    ]


def test_twodoors_visits_have_together_the_moments_of_every_peers_mix() -> None:
    whole = moments_of(FULL, 0, 1)
    seconds = FULL.mix_s / FULL.visits
    parts = [moments_of(FULL, part, FULL.visits) for part in range(FULL.visits)]
    assert all(0 <= moment < seconds for part in parts for moment in part)
    assert [moment + number * seconds for number, part in enumerate(parts) for moment in part] == pytest.approx(whole)


async def test_bulk_by_the_topic_is_counted_over_its_whole_window_once_it_has_drained() -> None:
    asked: list[tuple[float, float]] = []
    drained: list[bool] = []

    class Driver:
        outstanding = 2_000

        @asynccontextmanager
        async def saturated(self, _backlog: int, _drain_s: float) -> AsyncIterator[None]:
            yield
            drained.append(True)

        def rows_between(self, since_s: float, until_s: float) -> float:
            assert drained
            asked.append((since_s, until_s))
            return 100.0 * (until_s - since_s)

    arm = Arm("twodoor", "Twodoor")
    async with topic_as_bulk(arm, cast(TopicDriver, Driver()), 2_000, 1.0, settle_s=0.0)(0.0) as per_s:
        await asyncio.sleep(0.01)
    assert per_s() == pytest.approx(100)
    assert asked[0][1] - asked[0][0] >= 0.01
    assert not arm.errors


def test_a_peer_shares_the_cores_as_twodoor_does(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path), str(tmp_path), 1, 1, 1, 2, batching=True, prefix="", max_tokens=8)
    process = _start(dataclasses.replace(PEERS[0], command=("time",)), settings, tmp_path / "log")
    try:
        assert os.getsid(process.pid) == os.getsid(0)
        assert os.getpgid(process.pid) == process.pid
    finally:
        process.kill()
        process.wait()


def test_the_configuration_with_the_most_right_answers_counts() -> None:
    assert best_of(an_arm().trials) == Config(2, 1, True)


@pytest.mark.parametrize(
    ("wire", "answer"),
    [
        ("text", {"label": "positive", "score": 0.75}),
        ("texts", [{"label": "positive", "score": 0.75}]),
        ("v2", {"outputs": [{"name": "score", "data": [0.75]}, {"name": "label", "data": ["positive"]}]}),
    ],
)
def test_each_peer_is_asked_for_one_text_in_its_own_form(wire: str, answer: object) -> None:
    body = orjson.loads(body_of(wire, "fine"))  # type: ignore[arg-type]
    asked = {"text": "text", "texts": "texts", "v2": "inputs"}[wire]
    assert list(body) == [asked]
    assert "fine" in json.dumps(body)
    assert READERS[wire](answer) == (True, 0.75)  # type: ignore[index]


def test_triton_is_configured_by_its_config_file() -> None:
    changed = triton_config(CONFIG, Config(1, 4, batching=False))
    assert "count: 1 " in changed
    assert '"intra_op_thread_count" value { string_value: "4" }' in changed
    assert "dynamic_batching" not in changed
    assert "dynamic_batching" in triton_config(CONFIG, Config(1, 4, batching=True))


def test_a_config_file_that_cannot_be_changed_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 places"):
        triton_config("instance_group [ { count: 2 } ]", Config(1, 2, batching=True))


def test_the_table_has_the_medians_of_the_rounds_and_what_bulk_kept() -> None:
    head, _, row = report.table(FULL, [an_arm()])
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert cells["calls/s at 1"] == "60.0"
    assert cells["p50 ms at 1"] == "20.0"
    assert cells["calls/s at 32"] == ""
    assert cells["beside bulk p50 ms"] == "40.0"
    assert cells["kept |"] == "0.50 |"
    (tried,) = report.trials([an_arm()])
    assert tried.startswith("- LitServe (litserve 1.0): 1 process x 2 threads, batching on: 100 calls/s; ")


def test_the_files_hold_every_round_and_every_error(tmp_path: Path) -> None:
    arm = an_arm()
    arm.check("32 callers", a_result(5, 1.0, Counter({"status 500": 2})))
    report.write(tmp_path, a_run(), [arm])
    (found,) = json.loads((tmp_path / report.JSON_NAME).read_text())["arms"]
    assert found["callers"]["1"]["per_s"] == [50.0, 70.0, 60.0]
    assert found["mix"]["bulk_p50_ms"] == 40.0
    assert found["errors"] == ["32 callers: 2 x status 500"]
    assert "The mix has 6 calls an arm or more" in (tmp_path / report.TABLE_NAME).read_text()
    assert "**wrong:** litserve: 32 callers: 2 x status 500" in (tmp_path / report.TABLE_NAME).read_text()


def test_every_environment_has_a_hashed_lock_without_an_address_or_a_framework_nobody_needs() -> None:
    for name in ENVIRONMENTS:
        lock = (LOCKS / f"{name}.lock").read_text()
        assert "://" not in lock
        pinned = [line.partition("==")[0] for line in lock.splitlines() if "==" in line and not line.startswith(" ")]
        assert {"onnxruntime", "tokenizers", "numpy"} <= set(pinned)
        assert not {"torch", "tensorflow"} & set(pinned)
        assert lock.count("--hash=sha256:") >= len(pinned)


def test_all_peers_run_the_onnx_runtime_and_tokenizer_of_twodoors_own_lock() -> None:
    def pins(file: Path) -> set[str]:
        lines = file.read_text().splitlines()
        return {line.split(" ")[0] for line in lines if line.startswith(("onnxruntime==", "tokenizers=="))}

    own = pins(ROOT / "requirements" / "cpu.lock")
    assert len(own) == 2
    assert {name: pins(LOCKS / f"{name}.lock") for name in ENVIRONMENTS} == dict.fromkeys(ENVIRONMENTS, own)


def test_environments_are_chosen_by_name() -> None:
    assert install.environments([]) == list(ENVIRONMENTS)
    assert install.environments(["ray", "fastapi"]) == ["fastapi", "ray"]


def test_an_unknown_environment_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["peers", "install", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert "no environment is called nothing" in capsys.readouterr().err


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["peers", "--short"])
    monkeypatch.setattr("benchmarks.machine.load_before", lambda: {"load_1min": 2.0, "cpu_share": 0.5})
    assert run.main() == 1
    assert "the machine is busy" in capsys.readouterr().err
