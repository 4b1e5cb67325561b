"""The real Triton as a child process, with the Python-based ONNX Runtime backend beside it."""

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from local_stack.config import StackConfig
from local_stack.ports import LOOPBACK
from serving.errors import ConfigError

BACKEND = Path(__file__).parent.parent / "triton_backends" / "onnxruntime" / "model.py"
EXIT_TIMEOUT_S = 4
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Triton's Python backend keeps its regions


@dataclass(frozen=True, slots=True)
class Installation:
    """The GPU tier's virtual environment."""

    venv: Path
    python: str
    """Version of its Python, ``3.11``."""
    site_packages: Path

    @classmethod
    def find(cls, venv: Path) -> "Installation":
        """Look into a virtual environment; raises ConfigError that says what is missing."""
        venv = venv.absolute()
        packages = sorted(venv.glob("lib/python3.*/site-packages"))
        if not packages:
            raise ConfigError(f"{venv} is no virtual environment: `make setup` makes it")
        found = cls(venv, packages[-1].parent.name.removeprefix("python"), packages[-1])
        for path in (found.server, found.stub):
            if not path.exists():
                raise ConfigError(f"{path} is missing: `make setup` installs nvidia-pytriton into {venv}")
        return found

    @property
    def server(self) -> Path:
        """Triton's program."""
        return self.site_packages / "pytriton" / "tritonserver" / "bin" / "tritonserver"

    @property
    def stub(self) -> Path:
        """The program that runs a Python model; one for each version of Python."""
        folder = self.site_packages / "pytriton" / "tritonserver" / "python_backend_stubs"
        return folder / self.python / "triton_python_backend_stub"

    def environment(self) -> dict[str, str]:
        """Return what Triton and its stubs need: their libraries, and this environment's Python first in PATH."""
        libraries = [self.site_packages / "nvidia_pytriton.libs", *self._python_libraries()]
        # The operator's own, such as CUDA's, stay behind ours.
        own = os.environ.get("LD_LIBRARY_PATH")
        return {
            "LD_LIBRARY_PATH": ":".join([*map(str, libraries), *([own] if own else [])]),
            # The stub asks the first Python in PATH where its packages are.
            "PATH": f"{self.venv / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONNOUSERSITE": "1",
            # Official builds of ONNX Runtime report to their maker, and write an id to the temporary folder, unless told not to.
            "ORT_DISABLE_TELEMETRY": "1",
            # Weights and activations on huge pages: a model of 20 MB and more otherwise misses the TLB all the time.
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        }

    def _python_libraries(self) -> list[Path]:
        """Return the folder of libpython of the Python that this environment was made from, if it has one."""
        match = re.search(r"^home\s*=\s*(.+)$", (self.venv / "pyvenv.cfg").read_text(), re.MULTILINE)
        folder = Path(match.group(1)).parent / "lib" if match else None
        return [folder] if folder and any(folder.glob(f"libpython{self.python}.so*")) else []


def prepare(config: StackConfig) -> None:
    """Bring the backends folder up to date and remove what a killed Triton left in shared memory. Blocks."""
    if not model_names(config.repository):
        raise ConfigError(f"no model in {config.repository}: run `twodoor models build`")
    installation = Installation.find(config.stack.triton_venv)
    backends = backends_folder(config)
    source = installation.site_packages / "pytriton" / "tritonserver" / "backends" / "python"
    # Copies: Triton refuses a library that is a link out of the folder.
    for path in (source / "libtriton_python.so", source / "triton_python_backend_utils.py", installation.stub):
        _copy(path, backends / "python" / path.name)
    _copy(BACKEND, backends / "onnxruntime" / "model.py")
    clean_shared_memory(config)


def command(config: StackConfig, names: Sequence[str] | None = None) -> list[str]:
    """Return Triton's command line: explicit model control, loopback only.

    ``names``: the models to start with; without it every model of the repository.
    """
    stack = config.stack
    options = {
        "model-repository": config.repository,
        "backend-directory": backends_folder(config),
        "model-control-mode": "explicit",
        "strict-readiness": "true",
        # A model that does not load must not take the others down; the supervisor says which it was and why.
        "exit-on-error": "false",
        "exit-timeout-secs": EXIT_TIMEOUT_S,
        "http-address": LOOPBACK,
        "http-port": stack.triton_http_port,
        "grpc-address": LOOPBACK,
        "grpc-port": stack.triton_grpc_port,
        "metrics-address": LOOPBACK,
        "metrics-port": stack.triton_metrics_port,
        "allow-gpu-metrics": str(Path("/dev/nvidiactl").exists()).lower(),
    }
    return [
        str(Installation.find(stack.triton_venv).server),
        *(f"--{name}={value}" for name, value in options.items()),
        # Every config of ours is complete, and completing one starts a stub process more.
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix(config)}",
        # Past its default of 30 s Triton waits for ever for the end of a model process that is slow to start.
        "--backend-config=python,stub-timeout-seconds=600",
        *(f"--load-model={name}" for name in (model_names(config.repository) if names is None else names)),
    ]


def model_names(repository: Path) -> list[str]:
    """Return the names of the models that are complete enough for Triton to look at."""
    return sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))


def backends_folder(config: StackConfig) -> Path:
    """Return where this stack keeps Triton's backends."""
    return config.stack.home.absolute() / "backends"


def shared_memory_prefix(config: StackConfig) -> str:
    """Return a name that no other stack on this machine uses for its shared memory."""
    return f"twodoor-{hashlib.sha256(str(config.stack.home.absolute()).encode()).hexdigest()[:12]}-"


def clean_shared_memory(config: StackConfig) -> None:
    """Remove this stack's regions; only while its Triton does not run."""
    for path in SHARED_MEMORY.glob(f"{shared_memory_prefix(config)}*"):
        path.unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.copy(source, temporary)
    temporary.replace(target)
