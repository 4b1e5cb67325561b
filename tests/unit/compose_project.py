"""compose.yaml as Compose itself understands it, and the Dockerfile's stages: what the tests of both read."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPOSE, DOCKERFILE = ROOT / "compose.yaml", ROOT / "Dockerfile"
TIERS = ("gpu", "cpu")
OWN = ("gateway", "consumer", "models-gpu", "models-cpu", "triton-cpu")

Service = dict[str, Any]


def tool(name: str) -> str:
    """Return the path of a program of the dev group; a missing one fails the test."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert path is not None, f"{name} is missing: it comes with the dev group (make setup)"
    return path


def composed(*files: Path, profiles: tuple[str, ...] = TIERS) -> dict[str, Any]:
    """Return the configuration as Compose understands it, all profiles on, nothing from this machine's environment."""
    command = [tool("docker-compose"), "--env-file", os.devnull]
    command += [part for file in files or (COMPOSE,) for part in ("--file", str(file))]
    command += [part for profile in profiles for part in ("--profile", profile)]
    done = subprocess.run(
        [*command, "--project-directory", str(ROOT), "config", "--format", "json"],
        capture_output=True, text=True, timeout=60, check=False, env={"PATH": os.environ["PATH"], "HOME": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def stages() -> dict[str, dict[str, list[str]]]:
    """Return the Dockerfile's targets with the arguments of each instruction, those of a parent stage first."""
    found: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] = {}
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text(encoding="utf-8"))
    for line in text.splitlines():
        match = re.match(r"([A-Z]+) (.*)", line)
        if match is None:
            continue
        instruction, rest = match.groups()
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            current = {key: list(values) for key, values in found.get(base, {}).items()}
            found[name] = current
        current.setdefault(instruction, []).append(rest)
    return found


def exec_form(stage: dict[str, list[str]], instruction: str) -> list[str]:
    """Return the last ENTRYPOINT, CMD or HEALTHCHECK of a stage as a list; a shell form fails."""
    if instruction not in stage:
        return []
    text = stage[instruction][-1].partition("CMD ")[2] if instruction == "HEALTHCHECK" else stage[instruction][-1]
    return list(json.loads(text))


def command_of(services: dict[str, Service], name: str) -> list[str]:
    """Return the whole command line of one of our own images' services."""
    service = services[name]
    stage = stages()[service["build"]["target"]]
    return [*exec_form(stage, "ENTRYPOINT"), *(service.get("command") or exec_form(stage, "CMD"))]


def seconds(duration: str) -> float:
    """Read Compose's durations, such as 1m30s."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


def reachable_names(services: dict[str, Service], network: str) -> set[str]:
    names: set[str] = set()
    for name, service in services.items():
        if network in service.get("networks", {}):
            names |= {name, *((service["networks"][network] or {}).get("aliases") or ())}
    return names
