"""What can go wrong in a local stack: models that fail, hang or do not load, and the death of everything at once."""

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from local_stack import ConfigError, Stack
from local_stack.process import children, command_line, start_ticks
from local_stack.triton import SHARED_MEMORY
from tests.parts import remove, wait_until

pytestmark = pytest.mark.timeout(240)

WORDS = 100
TABLE = np.random.default_rng(0).normal(size=(WORDS, 2)).astype(np.float32)
CONFIG = """
name: "{name}"
platform: "onnxruntime_onnx"
max_batch_size: 64
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }}
]
output [ {{ name: "logits" data_type: {type} dims: [ {width} ] }} ]
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
dynamic_batching {{ max_queue_delay_microseconds: 100000 }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
"""

HANG = 99
HANGING = f"""
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            time.sleep(600 if {HANG} in ids else 0)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("logits", np.zeros((len(ids), 2), np.float32))]))
        return answers
"""


def model() -> onnx.ModelProto:
    """Sum of the table's rows at the ids: an id that is not in the table makes the run fail."""
    table, axis = numpy_helper.from_array(TABLE, "table"), numpy_helper.from_array(np.array([1], np.int64), "axis")
    last = numpy_helper.from_array(np.array([2], np.int64), "last")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["wide"]),
        helper.make_node("Mul", ["rows", "wide"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axis"], ["logits"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["b", "s"]) for n in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", 2])]
    graph = helper.make_graph(nodes, "sum", inputs, outputs, [table, axis, last])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write_model(repository: Path, name: str, width: int = 2, data_type: str = "TYPE_FP32", extra: str = "") -> None:
    """Write one model; another width or type makes a config that is not the model's."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    onnx.save(model(), folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(CONFIG.format(name=name, width=width, type=data_type) + extra)
    values = [float(v) for v in TABLE[[1, 2, 3]].sum(axis=0)]
    (folder / "canary.json").write_text(
        '{"inputs": {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},'
        f' "output": {{"name": "logits", "values": {values}, "tolerance": 0.05}}}}'
    )


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Kafka and Triton with two models that work and two whose config differs from the model."""
    folder = tmp_path_factory.mktemp("faults")
    repository = folder / "repository"
    write_model(repository, "sum")
    write_model(repository, "sum_bulk", extra="optimization { priority: PRIORITY_MIN }")
    write_model(repository, "hanging")
    hanging = (
        (repository / "hanging" / "config.pbtxt")
        .read_text()
        .replace('platform: "onnxruntime_onnx"', 'backend: "python"')
    )
    (repository / "hanging" / "config.pbtxt").write_text(hanging)
    (repository / "hanging" / "1" / "model.py").write_text(HANGING)
    write_model(repository, "wrong_width", width=3)
    write_model(repository, "wrong_type", data_type="TYPE_INT32")
    environment = {"TWODOOR_STACK_CANARY_INTERVAL_S": "0.5", "TWODOOR_STACK_SILENCE_TIMEOUT_S": "4"}
    running = Stack(folder / "home", ("kafka", "triton"), repository, environment=environment)
    with running:
        yield running
    remove(folder)


def infer(stack: Stack, ids: Sequence[Sequence[int]], name: str = "sum") -> httpx.Response:
    """Send rows of ids to Triton."""
    tensors = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    shape = [len(ids), len(ids[0])]
    inputs = [{"name": n, "shape": shape, "datatype": "INT64", "data": data} for n, data in tensors.items()]
    return httpx.post(f"http://{stack.triton_http}/v2/models/{name}/infer", json={"inputs": inputs}, timeout=30)


def logits(answer: httpx.Response) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the logits of an answer, [rows, 2]."""
    assert answer.status_code == 200, answer.text
    output = answer.json()["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def executions(stack: Stack, name: str = "sum") -> int:
    """Return how often a model has run."""
    stats = httpx.get(f"http://{stack.triton_http}/v2/models/{name}/stats").json()
    return int(stats["model_stats"][0]["execution_count"])


def heard(stack: Stack, text: str) -> bool:
    """Whether the supervisor has said something."""
    return any(text in line for line in stack.lines())


def test_a_model_that_does_not_fit_its_config_is_named_and_the_others_work(stack: Stack) -> None:
    lines = [line for line in stack.lines() if "does not load" in line]
    assert len(lines) == 2
    by_name = {line.split(":")[0]: line for line in lines}
    assert "output 'logits' has shape ['b', 2] in the model and [-1, 3] in the config" in by_name["wrong_width"]
    assert "output 'logits' is tensor(float) in the model and TYPE_INT32 in the config" in by_name["wrong_type"]
    for name in ("sum", "sum_bulk"):
        np.testing.assert_allclose(logits(infer(stack, [[1, 2], [3, 4]], name))[1], TABLE[3] + TABLE[4], rtol=1e-5)


def test_a_bad_row_in_a_batch_fails_alone_and_its_neighbours_get_their_own_answers(stack: Stack) -> None:
    before = executions(stack)
    rows = [[i, i + 1, WORDS + 7 if i == 5 else i + 2] for i in range(12)]
    with ThreadPoolExecutor(len(rows)) as pool:
        answers = list(pool.map(lambda row: infer(stack, [row]), rows))
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        if i == 5:
            assert answer.status_code == 400
            assert "out of data bounds" in answer.json()["error"]
        else:
            np.testing.assert_allclose(logits(answer)[0], TABLE[row].sum(axis=0), rtol=1e-4)
    assert executions(stack) - before < len(rows), "Triton did not batch, so nothing was shown"


def test_rows_of_different_lengths_at_the_same_time_get_their_own_answers(stack: Stack) -> None:
    rows = [list(range(1, 2 + i % 4)) for i in range(12)]
    with ThreadPoolExecutor(len(rows)) as pool:
        answers = list(pool.map(lambda row: infer(stack, [row]), rows))
    for row, answer in zip(rows, answers, strict=True):
        np.testing.assert_allclose(logits(answer)[0], TABLE[row].sum(axis=0), rtol=1e-4)


def test_a_model_that_hangs_is_loaded_again_and_the_process_that_hung_is_ended(stack: Stack) -> None:
    triton = stack.pid("triton")
    stub = next(pid for pid in children(triton) if "/hanging/" in "".join(command_line(pid)[1:2]))
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(infer, stack, [[HANG]], "hanging")
        wait_until(lambda: heard(stack, "hanging: ready again"), "the model was loaded again", 30)
        assert heard(stack, "hanging: it answered nothing for 4 s; loading it again")
        assert infer(stack, [[1]], "hanging").status_code == 200
        assert hung.result().status_code == 500
    wait_until(lambda: start_ticks(stub) is None, "the process that hung was ended", 15)
    assert stack.pid("triton") == triton


def test_a_model_whose_process_is_frozen_is_loaded_again(stack: Stack) -> None:
    stub = next(pid for pid in children(stack.pid("triton")) if "/sum/" in "".join(command_line(pid)[1:2]))
    os.kill(stub, signal.SIGSTOP)
    wait_until(lambda: heard(stack, "sum: ready again"), "the model was loaded again", 30)
    assert logits(infer(stack, [[1]])).shape == (1, 2)
    wait_until(lambda: start_ticks(stub) is None, "the frozen process was ended", 15)


def test_a_killed_triton_comes_back_with_its_models_and_leaves_no_shared_memory(stack: Stack) -> None:
    old, stubs = stack.pid("triton"), children(stack.pid("triton"))
    before = set(SHARED_MEMORY.iterdir())
    os.kill(old, signal.SIGKILL)
    stack.wait_ready("triton", other_than=old)
    assert heard(stack, "triton was killed by SIGKILL; starting it again in 0.2 s")
    assert logits(infer(stack, [[1]])).shape == (1, 2)
    assert [pid for pid in stubs if start_ticks(pid)] == []
    prefix = next(a for a in command_line(stack.pid("triton")) if "shm-region-prefix" in a).split("=")[-1]
    assert {p for p in before if p.name.startswith(prefix)} & set(SHARED_MEMORY.iterdir()) == set()


def test_after_the_death_of_everything_the_next_up_works_and_says_what_it_found(stack: Stack) -> None:
    pids = [stack.pid("kafka"), stack.pid("triton"), stack.supervisor_pid]
    stack.kill()
    wait_until(lambda: not any(start_ticks(pid) for pid in pids), "everything is dead")
    stack.start()
    assert heard(stack, "the last stack was killed; nothing of it is left running")
    assert logits(infer(stack, [[1]])).shape == (1, 2)


def test_services_end_with_a_killed_supervisor_and_the_next_up_works(stack: Stack) -> None:
    """The last test with this stack."""
    pids = [stack.pid("kafka"), stack.pid("triton")]
    os.kill(stack.supervisor_pid, signal.SIGKILL)
    wait_until(lambda: not any(start_ticks(pid) for pid in pids), "the services ended by themselves", 15)
    stack.start()
    assert logits(infer(stack, [[1]])).shape == (1, 2)


def test_a_service_that_can_never_start_ends_up_soon_and_says_why(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"no model in .*twodoor models build"):
        Stack(tmp_path / "home", ("triton",), tmp_path / "empty").start()
    environment = {"TWODOOR_GATEWAY_MAX_ROWS": "0"}
    with pytest.raises(ConfigError, match="TWODOOR_GATEWAY_MAX_ROWS"):
        Stack(tmp_path / "home2", ("gateway",), tmp_path, environment=environment).start()
    assert time.monotonic() - started < 30
    shutil.rmtree(tmp_path)
