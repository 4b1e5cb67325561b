"""What a machine has for a GPU run: the device, and a Triton whose ONNX Runtime backend can use it."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from local_stack.ports import LOOPBACK
from local_stack.triton import Installation, model_names
from serving.errors import ConfigError

ASK_TIMEOUT_S = 30.0
NATIVE_HOME = Path("/opt/tritonserver")
CUDA = "CUDAExecutionProvider"
# Both are slow to start for the first time: libraries of gigabytes are read.
_PROVIDERS = "import onnxruntime; print(*onnxruntime.get_available_providers())"


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run ONNX models on this machine. ``native``: the folder of NVIDIA's own Triton, None = ours, in a venv."""

    title: str
    native: Path | None = None

    def command(self, repository: Path, environment: Mapping[str, str]) -> list[str]:
        """Return the command line of NVIDIA's own Triton, on the ports of a stack's environment."""
        if self.native is None:
            raise ConfigError("the stack starts this Triton itself")
        options = {
            "model-repository": repository,
            "backend-directory": self.native / "backends",
            "model-control-mode": "explicit",
            "strict-readiness": "true",
            "http-address": LOOPBACK,
            "http-port": environment["TWODOOR_STACK_TRITON_HTTP_PORT"],
            "grpc-address": LOOPBACK,
            "grpc-port": environment["TWODOOR_STACK_TRITON_GRPC_PORT"],
            "metrics-address": LOOPBACK,
            "metrics-port": environment["TWODOOR_STACK_TRITON_METRICS_PORT"],
        }
        return [
            str(self.native / "bin" / "tritonserver"),
            *(f"--{name}={value}" for name, value in options.items()),
            "--disable-auto-complete-config",
            *(f"--load-model={name}" for name in model_names(repository)),
        ]


@dataclass(slots=True)
class Found:
    """What was found. ``lines`` tell it to people."""

    gpu: str | None = None
    backend: Backend | None = None
    lines: list[str] = field(default_factory=list)


def discover(triton_venv: Path, native_home: Path = NATIVE_HOME) -> Found:
    """Look at the device and at every Triton; NVIDIA's own goes first. Blocks for seconds."""
    found = Found(gpu=_gpu())
    found.lines.append(f"GPU: {found.gpu or 'none (nvidia-smi gives no device)'}")
    backends = [_native(native_home, found.lines), _venv(triton_venv, found.lines)]
    found.backend = next((backend for backend in backends if backend is not None), None)
    return found


def _gpu() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return lines[0] if lines else None


def _native(home: Path, lines: list[str]) -> Backend | None:
    if not (home / "bin" / "tritonserver").exists():
        lines.append(f"NVIDIA's own Triton: not in {home}")
        return None
    names = sorted(path.parent.name for path in home.glob("backends/*/libtriton_*.so"))
    lines.append(f"NVIDIA's own Triton in {home}, backends: {', '.join(names) or 'none'}")
    return Backend("NVIDIA's Triton, native ONNX Runtime backend", home) if "onnxruntime" in names else None


def _venv(venv: Path, lines: list[str]) -> Backend | None:
    try:
        installation = Installation.find(venv)
    except ConfigError as exc:
        lines.append(str(exc))
        return None
    providers = _providers(installation)
    lines.append(f"Triton in {venv}, ONNX Runtime with {', '.join(providers) or 'nothing that can be imported'}")
    if CUDA in providers:
        return Backend("Triton from the wheel, Python-based ONNX Runtime backend")
    lines.append(
        f"without {CUDA} there: in {venv} put the package onnxruntime-gpu in the place of onnxruntime "
        "(and the CUDA and cuDNN libraries it names)"
    )
    return None


def _providers(installation: Installation) -> list[str]:
    environment = {**os.environ, **installation.environment()}
    try:
        done = subprocess.run(
            [str(installation.venv / "bin" / "python"), "-c", _PROVIDERS],
            env=environment, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def cpu_instances(triton_log: str) -> list[str]:
    """Return the instances that our backend started on the CPU although it was asked for the GPU, from Triton's log."""
    return [
        line.split("instance=")[1].split()[0]
        for line in triton_log.splitlines()
        if "startup instance=" in line and "phase=load" in line and f"provider={CUDA}" not in line
    ]
