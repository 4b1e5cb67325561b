"""The CPU profile's Triton without a container: the image's layout script, command line and health check, for real."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import onnx
import psutil
import pytest
from onnx import TensorProto, helper

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 30.0
CONFIG = """
name: "tiny"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [{ name: "input_ids" data_type: TYPE_INT64 dims: [-1] }]
output [{ name: "ids" data_type: TYPE_INT64 dims: [-1] }]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("triton_health", ROOT / "deploy/triton/health.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def image_command() -> list[str]:
    """Return ENTRYPOINT and CMD of the Dockerfile's target triton-cpu."""
    text = (ROOT / "Dockerfile").read_text()
    stage = text[text.index(" AS triton-cpu") :]
    lines = [re.search(rf"^{word} (\[.*\])$", stage, re.MULTILINE) for word in ("ENTRYPOINT", "CMD")]
    return [part for line in lines if line for part in json.loads(line[1])]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "tiny" / "1").mkdir(parents=True)
    (folder / "tiny" / "config.pbtxt").write_text(CONFIG)
    shape = ["rows", "tokens"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["input_ids"], ["ids"])],
        "tiny",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)],
        [helper.make_tensor_value_info("ids", TensorProto.INT64, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(folder / "tiny" / "1" / "model.onnx"))
    (folder / "tiny" / "canary.json").write_text(json.dumps({"inputs": {"input_ids": [1, 2, 3]}}))
    return folder


@pytest.fixture
def server(tmp_path: Path, repository: Path) -> Iterator[tuple[psutil.Popen, str]]:
    """The server as the image starts it, with its folders, ports and addresses replaced by ones of this test."""
    (site,) = (ROOT / ".venv-triton").glob("lib/python3.*/site-packages")
    version, target = site.parent.name.removeprefix("python"), tmp_path / "triton"
    model = ROOT / "local_stack/triton_backends/onnxruntime/model.py"
    layout = ROOT / "deploy/triton/layout.sh"
    subprocess.run(["/bin/sh", str(layout), str(site), version, str(model), str(target)], check=True, timeout=60)
    http, grpc, metrics = free_port(), free_port(), free_port()
    replaced = [
        part.replace("/models/repository", str(repository)).replace("/opt/triton", str(target))
        for part in image_command()
    ]
    own = [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")]
    own += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    prefix = f"twodoor-test-{os.getpid()}-"
    environment = {
        "PATH": f"{ROOT / '.venv-triton/bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{target / 'lib'}:{sysconfig.get_config_var('LIBDIR')}",
        "PYTHONNOUSERSITE": "1",
        "HOME": str(tmp_path),
    }
    with (tmp_path / "triton.log").open("wb") as log:
        process = psutil.Popen(
            [*replaced, *own, f"--backend-config=python,shm-region-prefix-name={prefix}"],
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process, f"127.0.0.1:{http}"
    finally:
        for one in [*process.children(recursive=True), process] if process.is_running() else []:
            one.kill()
        process.wait(STOP_TIMEOUT_S)
        for region in Path("/dev/shm").glob(f"{prefix}*"):
            region.unlink(missing_ok=True)


def check(repository: Path, address: str, server_process: int) -> int:
    """Run the image's health check; process 1 of the container is the server here."""
    program = (
        "import sys, runpy; health = runpy.run_path(sys.argv[1], run_name='health')\n"
        "health['main'].__globals__['SERVER_PROCESS'] = int(sys.argv[4])\n"
        "sys.exit(health['main'](sys.argv[2], sys.argv[3]))"
    )
    arguments = [sys.executable, "-c", program, str(ROOT / "deploy/triton/health.py")]
    return subprocess.run(
        [*arguments, str(repository), address, str(server_process)], check=False, timeout=60
    ).returncode


def test_the_image_starts_triton_and_its_health_check_ends_a_server_whose_model_process_died(
    server: tuple[psutil.Popen, str], repository: Path
) -> None:
    process, address = server
    deadline = time.monotonic() + START_TIMEOUT_S
    while check(repository, address, process.pid) != 0:
        assert process.is_running()
        assert time.monotonic() < deadline, "Triton did not get ready"
        time.sleep(0.2)
    for stub in process.children():
        stub.kill()
    assert health_module().ask(address, "GET", "/v2/health/ready")[0] == 200, "Triton noticed by itself: drop the check"
    assert check(repository, address, process.pid) == 1
    assert process.wait(STOP_TIMEOUT_S) is not None


def test_the_health_check_fails_where_nothing_listens(repository: Path) -> None:
    assert check(repository, f"127.0.0.1:{free_port()}", os.getpid()) == 1
