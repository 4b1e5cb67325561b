"""Python-based Triton backend that serves `platform: "onnxruntime_onnx"` where the native backend is not installed.

It reads from a config what the native ONNX Runtime backend reads, so that one repository serves both. One thing the
native backend cannot do: PRIORITY_MIN becomes the lowest OS priority of the instance's process.
It runs inside Triton's stub process, in the GPU tier's Python, and imports nothing of this project.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

# Official builds of ONNX Runtime report to their maker unless told not to, before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils

# Triton 24.10's Python backend was built against NumPy 1. Under NumPy 2, which Python 3.13 needs, its conversions give
# wrong shapes without a word, so there tensors go through DLPack.
NUMPY_2 = int(np.__version__.split(".")[0]) >= 2

LOWEST_PRIORITY = 19
# On a busy machine the lowest priority gets next to nothing, and a model has to become ready some time.
LOADING_PRIORITY = 10
# An arena only grows where shapes vary; without one a large batch takes 1.5 times as long. So it is shrunk, but not
# after every run, which would cost a large batch 6 %.
SHRINK_EVERY_RUNS = 64
# Triton's name of a type → what ONNX Runtime calls it.
ORT_TYPES = {
    "TYPE_BOOL": "tensor(bool)",
    "TYPE_UINT8": "tensor(uint8)",
    "TYPE_UINT16": "tensor(uint16)",
    "TYPE_UINT32": "tensor(uint32)",
    "TYPE_UINT64": "tensor(uint64)",
    "TYPE_INT8": "tensor(int8)",
    "TYPE_INT16": "tensor(int16)",
    "TYPE_INT32": "tensor(int32)",
    "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
    "TYPE_FP64": "tensor(double)",
    "TYPE_STRING": "tensor(string)",
}
# What a config's optimization.graph.level means to the native backend; anything else is "all".
GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class InputError(Exception):
    """Raised when a request's own tensors are at fault."""


class TritonPythonModel:
    """One instance of one ONNX model; Triton calls the three methods from one thread."""

    def initialize(self, args):
        """Load the model and check it against its config; an exception here makes the model fail to load."""
        begin_s = time.monotonic()
        tell_startup(args, f"phase=imports seconds={process_age_s():.3f}")
        config = json.loads(args["model_config"])
        bulk = config.get("optimization", {}).get("priority") == "PRIORITY_MIN"
        others = other_threads() if bulk else set()
        if bulk:
            lower_priority(LOADING_PRIORITY, others)
        path = model_path(args, config)
        self._session = ort.InferenceSession(str(path), session_options(config), providers=providers(args))
        self._batched = int(config.get("max_batch_size", 0)) > 0
        self._inputs = {item["name"]: item for item in config["input"]}
        self._outputs = [item["name"] for item in config["output"]]
        check_signature(self._session, config, self._batched)
        if bulk:  # now that the session's threads are there too
            lower_priority(LOWEST_PRIORITY, others)
        self._runs = 0
        self._shrink = shrinking(config)
        provider = self._session.get_providers()[0]
        tell_startup(args, f"phase=load seconds={time.monotonic() - begin_s:.3f} provider={provider}")

    def execute(self, requests):
        """Answer every request: those of equal shapes in one run, and a failure only for the request that caused it."""
        responses = [None] * len(requests)
        groups = defaultdict(list)
        for index, request in enumerate(requests):
            try:
                feed = self._feed(request)
            except InputError as exc:
                responses[index] = failure(exc)
                continue
            # A request without a batch dimension shares a run with no other.
            key = tuple((a.dtype.str, a.shape[1:]) for a in feed.values()) if self._batched else index
            groups[key].append((index, feed))
        for group in groups.values():
            self._run_group(requests, group, responses)
        return responses

    def finalize(self):
        """Free the model's memory."""
        self._session = None

    def _run_group(self, requests, group, responses):
        """Run requests of equal shapes together; if that fails, each alone, so that no neighbour is taken down."""
        try:
            if len(group) == 1:
                feed = group[0][1]
            else:
                feed = {name: np.concatenate([f[name] for _, f in group]) for name in self._inputs}
            self._runs += 1
            shrink = self._shrink if self._runs % SHRINK_EVERY_RUNS == 0 else None
            outputs = self._session.run(self._outputs, feed, shrink)
            start = 0
            for index, request_feed in group:
                rows = len(next(iter(request_feed.values()))) if self._batched else None
                part = outputs if len(group) == 1 else [self._cut(o, start, rows, group) for o in outputs]
                start += rows or 0
                responses[index] = self._response(requests[index], part)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it has to become the answer of these requests
            if len(group) == 1:
                pb_utils.Logger.log_error(f"run failed: {exc}")
                responses[group[0][0]] = failure(exc)
                return
            for one in group:
                self._run_group(requests, [one], responses)

    @staticmethod
    def _cut(output, start, rows, group):
        """Return one request's rows of a joined output; a model that mixes rows cannot be cut."""
        total = sum(len(next(iter(feed.values()))) for _, feed in group)
        if output.ndim == 0 or len(output) != total:
            raise ValueError(f"the model answered {output.shape} for {total} rows")
        return output[start : start + rows]

    def _feed(self, request):
        """Return name → array of one request; raises InputError."""
        feed = {}
        for name, item in self._inputs.items():
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                raise InputError(f"input '{name}' is missing")
            array = np.from_dlpack(tensor) if NUMPY_2 else tensor.as_numpy()
            feed[name] = strings(name, array) if item["data_type"] == "TYPE_STRING" else array
        return feed

    def _response(self, request, outputs):
        wanted = set(request.requested_output_names())
        tensors = [
            to_tensor(name, np.ascontiguousarray(array))
            for name, array in zip(self._outputs, outputs, strict=True)
            if name in wanted
        ]
        return pb_utils.InferenceResponse(tensors)


def process_age_s():
    """Return how long ago the kernel started this process, in steps of its clock tick."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def tell_startup(args, text):
    """Log how long a phase of an instance's start took; what follows until Triton calls it ready is its warm-up."""
    pb_utils.Logger.log_info(f"startup instance={args['model_instance_name']} {text}")


def report_all_but_capsules(unraisable):
    """Report an error as ever, but for the one that comes with each array the Python backend took by DLPack."""
    if not (unraisable.exc_type is ValueError and "PyCapsule_GetPointer" in str(unraisable.exc_value)):
        sys.__unraisablehook__(unraisable)


if NUMPY_2:
    # It renames NumPy's capsule, whose end then finds another name than its own. The memory is freed all the same.
    sys.unraisablehook = report_all_but_capsules


def to_tensor(name, array):
    """Return an output tensor of an array in C order."""
    return pb_utils.Tensor.from_dlpack(name, array) if NUMPY_2 else pb_utils.Tensor(name, array)


def failure(exc):
    """Return an error response; INVALID_ARGUMENT only where the request's own tensors are at fault."""
    invalid = isinstance(exc, (InputError, ort.capi.onnxruntime_pybind11_state.InvalidArgument))
    code = pb_utils.TritonError.INVALID_ARG if invalid else pb_utils.TritonError.INTERNAL
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(exc), code))


def strings(name, array):
    """Return an array of str, as ONNX Runtime wants it, of Triton's bytes."""
    try:
        flat = [item.decode("utf-8") if isinstance(item, bytes) else str(item) for item in array.ravel()]
    except UnicodeDecodeError as exc:
        raise InputError(f"input '{name}' is not UTF-8") from exc
    return np.array(flat, dtype=np.object_).reshape(array.shape)


def other_threads():
    """Return the threads that are not ours: the stub's own, which tells Triton every 0.3 s that this process lives."""
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()} - {threading.get_native_id()}


def lower_priority(nice, spared):
    """Give this thread and those it started an OS priority: on Linux a nice value belongs to a thread.

    The stub's own thread is spared: at the lowest priority it is late on a busy machine, and Triton gives the process up after 1 s.
    """
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) not in spared:
            with contextlib.suppress(ProcessLookupError):  # a thread may end between the list and the call
                os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def model_path(args, config):
    """Return the file of the model version that Triton is loading."""
    name = config.get("default_model_filename") or "model.onnx"
    path = Path(args["model_repository"]) / args["model_version"] / name
    if not path.exists():
        raise pb_utils.TritonModelException(f"{path.name} of version {args['model_version']} does not exist")
    return path


def session_options(config):
    """Return the options that a config asks for, under the native backend's names."""
    parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", 0))
    options.inter_op_num_threads = int(parameters.get("inter_op_thread_count", 0))
    parallel = int(parameters.get("execution_mode", 0)) == 1
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = GRAPH_LEVELS.get(level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    options.enable_cpu_mem_arena = parameters.get("enable_mem_arena", "1") == "1"
    # Shapes vary, and a plan is kept for each.
    options.enable_mem_pattern = parameters.get("enable_mem_pattern", "0") == "1"
    # A spinning thread takes the core away from the other lane and from every neighbour process.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def shrinking(config):
    """Return run options that give unused memory of the arena back; None if the config wants no arena."""
    if config.get("parameters", {}).get("enable_mem_arena", {}).get("string_value", "1") != "1":
        return None
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def providers(args):
    """Return ONNX Runtime's providers: CUDA where Triton resolved KIND_GPU and the GPU build is installed."""
    if args["model_instance_kind"] != "GPU":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pb_utils.Logger.log_warn("a GPU instance runs on the CPU: onnxruntime-gpu is not installed")
        return ["CPUExecutionProvider"]
    if hasattr(ort, "preload_dlls"):
        # CUDA's and cuDNN's libraries come as packages beside ONNX Runtime, where no loader looks for them.
        ort.preload_dlls(directory="")
    cuda = {
        "device_id": int(args["model_instance_device_id"]),
        "arena_extend_strategy": "kSameAsRequested",
    }
    return [("CUDAExecutionProvider", cuda), "CPUExecutionProvider"]


def check_signature(session, config, batched):
    """Refuse a model whose inputs or outputs are not those of its config, naming each difference."""
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    problems = [f"the config lacks input '{n}'" for n in inputs if n not in {i["name"] for i in config["input"]}]
    for kind, nodes, items in (("input", inputs, config["input"]), ("output", outputs, config["output"])):
        for item in items:
            node = nodes.get(item["name"])
            if node is None:
                problems.append(f"the model has no {kind} '{item['name']}', it has {sorted(nodes)}")
                continue
            problems += [f"{kind} '{node.name}' {text}" for text in differences(node, item, batched)]
    if problems:
        raise pb_utils.TritonModelException(
            f"model and config.pbtxt of '{config['name']}' differ: {'; '.join(problems)}"
        )


def differences(node, item, batched):
    """Yield what differs between one tensor of the model and its entry in the config."""
    expected = ORT_TYPES.get(item["data_type"])
    if expected != node.type:
        yield f"is {node.type} in the model and {item['data_type']} in the config"
    dims = [int(d) for d in item.get("reshape", {}).get("shape", item["dims"])]
    wanted = ([-1] if batched else []) + dims
    if batched and node.shape and isinstance(node.shape[0], int):
        yield "has a fixed first dimension in the model, so it cannot be batched (max_batch_size must be 0)"
    elif len(wanted) != len(node.shape) or any(
        isinstance(have, int) and want not in (-1, have) for want, have in zip(wanted, node.shape, strict=True)
    ):
        yield f"has shape {node.shape} in the model and {wanted} in the config"
