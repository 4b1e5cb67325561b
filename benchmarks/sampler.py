"""Runs a door inside a sampling profiler: where the CPU time of its main thread goes, by stage and by function.

``python -m benchmarks.sampler FILE gateway|batch_consumer``: SIGUSR1 starts a count, SIGUSR2 ends it and writes FILE.
A timer of the main thread's own CPU time interrupts it, so that neither waiting nor gRPC's threads are counted.
"""

import ctypes
import json
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypedDict

# The kernel counts CPU time in ticks of about this length, so that more samples a second would be no more exact.
INTERVAL_NS = 2_000_000
CLOCK_THREAD_CPUTIME_ID = 3
SIGEV_SIGNAL = 0

Stages = Sequence[tuple[str, Sequence[str]]]
# A sample belongs to the innermost frame that stands in here: part of a file's path, or "file:function".
GATEWAY_STAGES: Stages = (
    ("tokenize", ("serving/preprocess.py:encode", "serving/preprocess.py:_row", "serving/preprocess.py:check_text",
                  "serving/pipeline.py:encode", "serving/pipeline.py:check_and_encode", "serving/pipeline.py:encode_one")),
    ("tensors, protobuf and gRPC", ("/tritonclient/", "/grpc/", "/google/protobuf/", "serving/triton_client.py",
                                    "serving/preprocess.py:pad", "serving/models.py", "serving/infer_")),
    ("render and envelope", ("gateway/answers.py", "serving/postprocess.py", "serving/codec.py:encode_json",
                             "gateway/envelope.py", "gateway/metrics.py", "/prometheus_client/", "/opentelemetry/",
                             "serving/telemetry.py", "starlette/responses.py")),
    ("body, JSON and key", ("gateway/body.py", "gateway/forms.py", "serving/codec.py", "gateway/keys.py",
                            "gateway/ratelimit.py")),
    ("admission and joining", ("gateway/admission.py", "gateway/predict.py", "gateway/join", "serving/pipeline.py",
                               "serving/registry.py", "serving/preprocess.py:reserve_tokens", "serving/deadline.py")),
    ("HTTP server and framework", ("/uvicorn/", "/starlette/", "/fastapi/", "gateway/")),
)  # fmt: skip
CONSUMER_STAGES: Stages = (
    ("tokenize", ("serving/preprocess.py:encode", "serving/preprocess.py:_row", "serving/preprocess.py:check_text",
                  "serving/pipeline.py:encode", "serving/pipeline.py:check_and_encode", "batch_consumer/encode.py")),
    ("tensors, protobuf and gRPC", ("/tritonclient/", "/grpc/", "/google/protobuf/", "serving/triton_client.py",
                                    "serving/preprocess.py:pad", "serving/models.py", "serving/infer_")),
    ("render results", ("serving/postprocess.py", "serving/codec.py:encode_json", "batch_consumer/results.py")),
    ("commit", ("batch_consumer/transactions.py", "batch_consumer/producers.py", "/aiokafka/producer/")),
    ("read records", ("batch_consumer/records.py", "batch_consumer/topic.py", "batch_consumer/partition.py",
                      "batch_consumer/owned.py", "batch_consumer/intake.py", "serving/codec.py", "serving/v1",
                      "batch_consumer/session.py", "batch_consumer/broker.py", "/aiokafka/")),
    ("micro-batches", ("batch_consumer/", "serving/pipeline.py", "serving/")),
)  # fmt: skip
STAGES: Mapping[str, Stages] = {"gateway": GATEWAY_STAGES, "batch_consumer": CONSUMER_STAGES}
LOOP = "event loop"


class Sampled(TypedDict):
    """What one count has found; ``main_cpu_s`` and ``all_cpu_s`` are of the main thread and of the whole process."""

    main_cpu_s: float
    all_cpu_s: float
    stages: dict[str, int]
    functions: dict[str, int]


class Sampler:
    """Counts samples of the main thread."""

    def __init__(self, stages: Stages, file: Path) -> None:
        self._stages, self._file = stages, file
        self._start()

    def install(self) -> None:
        """Take the signals and start the timer."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR1, lambda *_: self._start())
        signal.signal(signal.SIGUSR2, lambda *_: self._write())
        start_timer(INTERVAL_NS)

    def _start(self) -> None:
        self._by_stage: Counter[str] = Counter()
        self._by_function: Counter[str] = Counter()
        self._main_s, self._all_s = time.thread_time(), time.process_time()

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self._by_function[name_of(frame)] += 1
        self._by_stage[stage_of(frame, self._stages)] += 1

    def _write(self) -> None:
        content = Sampled(
            main_cpu_s=time.thread_time() - self._main_s,
            all_cpu_s=time.process_time() - self._all_s,
            stages=dict(self._by_stage),
            functions=dict(self._by_function),
        )
        partial = self._file.with_suffix(".part")
        partial.write_text(json.dumps(content))
        partial.replace(self._file)


def stage_of(frame: FrameType, stages: Stages) -> str:
    """Return the stage of the innermost frame that belongs to one."""
    outer: FrameType | None = frame
    while outer is not None:
        code = outer.f_code
        place = f"{code.co_filename}:{code.co_name}"
        for stage, patterns in stages:
            if any(pattern in place for pattern in patterns):
                return stage
        outer = outer.f_back
    return LOOP


def name_of(frame: FrameType) -> str:
    """Return the function a frame runs, as the last two parts of its file and its name."""
    code = frame.f_code
    return f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])}:{code.co_name}"


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_int * 12),
    )


class _TimerSpec(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns"))


def start_timer(interval_ns: int) -> None:
    """Let SIGPROF come whenever this thread has used so much CPU time more."""
    libc = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    event = _SigEvent(None, signal.SIGPROF, SIGEV_SIGNAL)
    spec = _TimerSpec(0, interval_ns, 0, interval_ns)
    if libc.timer_create(CLOCK_THREAD_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    if libc.timer_settime(timer, 0, ctypes.byref(spec), None):
        raise OSError(ctypes.get_errno(), "timer_settime")


def main() -> None:
    """Run the door; this process ends as the door does."""
    file, door = Path(sys.argv[1]), sys.argv[2]
    sys.argv = [door]
    sys.path.insert(0, str(Path.cwd()))
    Sampler(STAGES[door], file).install()
    runpy.run_module(door, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
