"""Each import contract is able to fail: a planted violation is found by the contract it breaks."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "batch_consumer", "serving", "jobs", "model_builder", "local_stack", "twodoor")
PLANTED = {
    "The core knows no door, no web framework and no Kafka": ("serving/planted.py", "import fastapi"),
    "What is kept knows of the core only errors, settings and crashpoints": ("jobs/planted.py", "import serving.codec"),
    "The doors do not know each other, nor the builders": ("gateway/planted.py", "import batch_consumer"),
    "Nothing below knows the command line": ("local_stack/planted.py", "import twodoor"),
    "The command line and client reach the doors only over the network, and of the core only wire forms and migrations": (
        "twodoor/planted.py",
        "import serving.errors",
    ),
    "Only serving.triton_client imports tritonclient": ("gateway/planted.py", "import tritonclient.grpc"),
    "No package has an import cycle between its modules": ("serving/errors.py", "import serving.pipeline"),
}


def contracts() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]]


def test_every_contract_has_a_violation_to_find() -> None:
    assert set(contracts()) == set(PLANTED)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_found(name: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file, statement = PLANTED[name]
    with (tmp_path / file).open("a") as planted:
        planted.write(f"\n{statement}\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    flat = " ".join(result.stdout.split())
    assert result.returncode != 0, flat
    assert f"{name} BROKEN" in flat
