"""The prepared GPU check: what it finds on a machine, what it refuses, and that it keeps to its time."""

import asyncio
import stat
from pathlib import Path

import pytest

from benchmarks.bench import Section
from benchmarks.gpu_check import STOP_S, SWEEP_MS, Budget
from benchmarks.gpu_dry import check_sweep
from benchmarks.gpu_machine import cpu_instances, discover
from benchmarks.gpu_models import HALF_TOLERANCE, MODEL, HalfExpected, check_configs, cpu_form
from benchmarks.stats import Figure
from model_builder.config import ModelConfig, render
from serving.errors import ConfigError
from serving.triton_client import parse_config

CONFIG = ModelConfig(
    name=MODEL, task="classify", output="logits", output_size=2, max_tokens=512, prompt_prefix="",
    tokenizer_sha256="ab" * 32, labels=("negative", "positive"), cores=2, for_gpu=True,
)  # fmt: skip


def write_repository(folder: Path) -> Path:
    for bulk in (False, True):
        model = folder / (f"{MODEL}_bulk" if bulk else MODEL)
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(render(CONFIG, bulk=bulk))
        (model / "labels.txt").write_text("negative\npositive\n")
    return folder


async def section() -> Section:
    return Section("mix", "Mix", [Figure("p50", "ms", (1.0,))])


async def endless() -> Section:
    await asyncio.Event().wait()
    raise AssertionError("it was not ended")


def test_a_phase_that_does_not_fit_is_named_and_not_begun(capsys: pytest.CaptureFixture[str]) -> None:
    budget = Budget(STOP_S + 30)
    asyncio.run(budget.run("short", 10, section))
    asyncio.run(budget.run("long", 40, endless))
    assert [done.name for done in budget.sections] == ["mix"]
    assert [line.partition(":")[0] for line in budget.left_out] == ["long"]
    assert "short: p50: 1.00 ms" in capsys.readouterr().out


def test_a_phase_that_takes_too_long_is_ended() -> None:
    budget = Budget(STOP_S + 0.05)
    asyncio.run(budget.run("hangs", 0, endless))
    assert budget.left_out == ["hangs: not done when the time was over"]
    assert budget.left_s <= 0


def test_nvidia_s_own_triton_goes_first_where_it_can_run_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'NVIDIA X, 80 GiB, 570.1'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    home = tmp_path / "tritonserver"
    for name in (
        "bin/tritonserver",
        "backends/onnxruntime/libtriton_onnxruntime.so",
        "backends/python/libtriton_python.so",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    found = discover(tmp_path / "no-venv", home)
    assert found.gpu == "NVIDIA X, 80 GiB, 570.1"
    assert found.backend is not None
    assert found.backend.native == home
    (home / "backends/onnxruntime/libtriton_onnxruntime.so").unlink()
    assert discover(tmp_path / "no-venv", home).backend is None


def test_instances_that_fell_back_to_the_cpu_are_found_in_triton_s_log() -> None:
    log = "\n".join(
        f'I1 2 3 model.py:1] "startup instance={name} phase=load seconds=0.2 provider={provider}"'
        for name, provider in (("m_0_0", "CUDAExecutionProvider"), ("m_0_1", "CPUExecutionProvider"))
    )
    assert cpu_instances(log) == ["m_0_1"]


def test_the_gpu_s_configs_are_read_as_a_door_reads_them(tmp_path: Path) -> None:
    assert check_configs(write_repository(tmp_path)).max_tokens == 512


@pytest.mark.parametrize(
    ("model", "old", "new", "reason"),
    [
        (MODEL, 'name: "1x512"', 'name: "again"', ""),
        (MODEL, "dims: [ 512 ]", "dims: [ 448 ]", "512"),
        (f"{MODEL}_bulk", "PRIORITY_MIN", "PRIORITY_MAX", "PRIORITY_MIN"),
        (f"{MODEL}_bulk", "KIND_AUTO", "KIND_CPU", "placed|place"),
        (MODEL, "max_queue_size: 512", "max_queue_size: 0", "queue"),
    ],
)
def test_a_config_that_would_spoil_the_run_is_refused(
    tmp_path: Path, model: str, old: str, new: str, reason: str
) -> None:
    file = write_repository(tmp_path) / model / "config.pbtxt"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    if not reason:
        check_configs(tmp_path)
        return
    with pytest.raises(ConfigError, match=reason):
        check_configs(tmp_path)


def test_the_form_for_a_cpu_differs_by_its_warm_up_alone(tmp_path: Path) -> None:
    source = write_repository(tmp_path / "gpu")
    cpu_form(source, tmp_path / "cpu")
    for name in (MODEL, f"{MODEL}_bulk"):
        gpu, cpu = (parse_config((folder / name / "config.pbtxt").read_text()) for folder in (source, tmp_path / "cpu"))
        assert len(cpu.pop("model_warmup")) == 1
        del gpu["model_warmup"]
        assert cpu == gpu


def test_the_consumer_takes_every_value_of_the_sweep() -> None:
    check_sweep(SWEEP_MS)
    with pytest.raises(ValueError, match="bulk_batch_ms"):
        check_sweep([-1])


def test_an_answer_of_fp16_may_differ_a_little_and_no_more() -> None:
    expected = HalfExpected(True, 0.9)
    assert not expected.fault(True, 0.9 + HALF_TOLERANCE / 2)
    assert expected.fault(True, 0.9 - 2 * HALF_TOLERANCE) == "wrong score"
    assert expected.fault(False, 0.9) == "wrong label"
    assert expected.fault(True, float("nan")) == "wrong score"
