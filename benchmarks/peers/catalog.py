"""The peers: which environment each runs in, what starts it, and how its callers speak."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
VENVS = ROOT / ".venv-peers"
LOCKS = ROOT / "requirements" / "peers"

Wire = Literal["text", "texts", "v2"]
"""A body with one ``text``, with a list of one text, or a V2 inference request."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of somebody else's that can serve the same model over HTTP."""

    name: str
    title: str
    environment: str
    """Name of its folder in .venv-peers and of its lock."""
    command: tuple[str, ...]
    """Module and arguments."""
    packages: tuple[str, ...]
    """Packages whose versions stand in the report."""
    wire: Mapping[bool, Wire]
    """How callers speak with batching and without."""
    health: str
    """A path whose GET costs nothing."""
    start_s: float = 90.0
    waits: bool = True
    """Whether it lets one say how long a batch waits for its rows."""
    main_environment: bool = False
    """Whether Twodoor's own environment has all it needs, and serves where its own is not installed."""

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        own = VENVS / self.environment / "bin" / "python"
        return Path(sys.executable) if self.main_environment and not own.is_file() else own

    @property
    def installed(self) -> bool:
        """Whether its environment is there."""
        return self.python.is_file()

    def versions(self) -> dict[str, str]:
        """Return the versions of its packages, read from its environment."""
        path = [str(folder) for folder in self.python.parents[1].glob("lib/python*/site-packages")]
        found = {str(entry.metadata["Name"]).lower(): entry.version for entry in distributions(path=path)}
        return {name: found.get(name, "unknown") for name in (*self.packages, "onnxruntime")}


ONE_TEXT: Mapping[bool, Wire] = {True: "text", False: "text"}
SERVERS = "benchmarks.peers.servers"
PEERS = (
    Peer(
        "fastapi-async", "FastAPI + ONNX Runtime, async", "fastapi", (f"{SERVERS}.fastapi_server", "app_async"),
        ("fastapi", "uvicorn"), ONE_TEXT, "/healthz", main_environment=True,
    ),
    Peer(
        "fastapi-threads", "FastAPI + ONNX Runtime, thread pool", "fastapi", (f"{SERVERS}.fastapi_server", "app_threads"),
        ("fastapi", "uvicorn"), ONE_TEXT, "/healthz", main_environment=True,
    ),
    Peer("litserve", "LitServe", "litserve", (f"{SERVERS}.litserve_server",), ("litserve", "uvicorn"), ONE_TEXT, "/health"),
    Peer(
        "bentoml", "BentoML", "bentoml", (f"{SERVERS}.bentoml_server",), ("bentoml", "uvicorn"),
        {True: "texts", False: "text"}, "/livez", waits=False,
    ),
    Peer(
        "mlserver", "MLServer", "mlserver", (f"{SERVERS}.mlserver_server",), ("mlserver", "uvicorn"),
        {True: "v2", False: "v2"}, "/v2/health/live",
    ),
    Peer("ray", "Ray Serve", "ray", (f"{SERVERS}.ray_server",), ("ray", "uvicorn"), ONE_TEXT, "/predict", start_s=150.0),
)  # fmt: skip
TRITON, TWODOOR, LOOP = "triton", "twodoor", "loop"
NAMES = (TWODOOR, *(peer.name for peer in PEERS), TRITON, LOOP)
"""What can be chosen."""
ENVIRONMENTS = tuple(dict.fromkeys(peer.environment for peer in PEERS))
