"""The images: the Dockerfile is linted, its commands exist, and every container gives up what it does not need."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from serving import settings
from serving.settings import Settings
from tests.unit.compose_project import (
    DOCKERFILE,
    ROOT,
    Service,
    command_of,
    composed,
    exec_form,
    seconds,
    stages,
    tool,
)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return composed()


@pytest.fixture(scope="module")
def services(project: dict[str, Any]) -> dict[str, Service]:
    return dict(project["services"])


def test_the_dockerfile_has_no_finding_of_the_linter() -> None:
    done = subprocess.run([tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_finds_something_in_a_bad_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN apt-get install vim\nCMD vim\n")
    done = subprocess.run(
        [tool("hadolint"), str(tmp_path / "Dockerfile")], capture_output=True, timeout=60, check=False
    )
    assert done.returncode != 0


@pytest.mark.parametrize("name", ["gateway", "consumer", "migrate", "models-gpu", "models-cpu"])
def test_commands_name_a_module_that_can_be_run(name: str, services: dict[str, Service]) -> None:
    command = command_of(services, name)
    assert command[:2] in (["python", "-m"], ["python", "/opt/twodoor/with_secrets.py"])
    module = command[-1] if command[1] != "-m" else command[2]
    assert find_spec(f"{module}.__main__") is not None
    copied = " ".join(stages()[services[name]["build"]["target"]]["COPY"])
    assert f"/app/{module.split('.')[0]}" in copied
    assert "/app/serving" in copied


def test_doors_carry_what_is_kept_of_jobs_and_the_one_shots_scripts() -> None:
    for door in ("gateway", "consumer"):
        copied = " ".join(stages()[door]["COPY"])
        assert all(name in copied for name in ("/app/jobs", "deploy/with_secrets.py", "/app/create_bucket.py"))


def test_a_secret_becomes_a_variable_and_one_that_is_set_wins(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os, sys; print(os.environ['A_KEY'], os.environ['B_KEY'], sys.argv[1:])")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name in ("A_KEY", "B_KEY", "identities.json"):
        (secrets / name).write_text("from the file\n")
    code = f"import with_secrets, pathlib; with_secrets.main(['show', 'x'], pathlib.Path({str(secrets)!r}))"
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'deploy'}", "B_KEY": "set"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.stdout == "from the file set ['x']\n", done.stderr


@pytest.mark.parametrize("name", ["models-gpu", "models-cpu"])
def test_the_model_builder_knows_the_flags_it_is_given(name: str, services: dict[str, Service]) -> None:
    arguments = [sys.executable, *command_of(services, name)[1:], "--help"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "cls"), [("gateway", settings.GatewaySettings), ("consumer", settings.ConsumerSettings)]
)
def test_a_door_is_checked_at_the_port_its_settings_say(
    name: str, cls: type[Settings], services: dict[str, Service]
) -> None:
    check = exec_form(stages()[name], "HEALTHCHECK")
    port = services[name]["environment"][f"TWODOOR_{name.upper()}_PORT"]
    assert check[2] == port == str(cls.model_fields["port"].default)
    assert check[3] in ("/healthz", "/readyz")


def test_every_long_running_service_has_a_health_check(services: dict[str, Service]) -> None:
    for name, service in services.items():
        target = service.get("build", {}).get("target")
        checked = "healthcheck" in service or (target and "HEALTHCHECK" in stages()[target])
        assert checked or service["restart"] == "no", name


def test_a_service_has_longer_to_stop_than_it_takes_to_drain(services: dict[str, Service]) -> None:
    def grace(name: str) -> float:
        return seconds(services[name]["stop_grace_period"])

    gateway, consumer = settings.GatewaySettings.model_fields, settings.ConsumerSettings.model_fields
    assert grace("gateway") > gateway["shutdown_timeout_s"].default
    assert grace("consumer") > consumer["drain_timeout_s"].default + 2 * consumer["kafka_timeout_s"].default
    for name in ("triton-gpu", "triton-cpu"):
        arguments = services[name].get("command") or command_of(services, name)
        (exit_timeout,) = (a.partition("=")[2] for a in arguments if a.startswith("--exit-timeout-secs="))
        assert grace(name) > float(exit_timeout)


def test_every_service_is_hardened(services: dict[str, Service]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].split(":")[0] not in ("", "0", "root"), name
        assert not service.get("privileged"), name
        assert int(service["mem_limit"]) > 0, name
        assert service["pids_limit"] > 0, name
        assert service["restart"] in ("no", "unless-stopped"), name


def test_every_image_is_pinned_to_a_release(services: dict[str, Service]) -> None:
    images = [service["image"] for service in services.values()]
    images += [stage["FROM"][-1].split(" AS ")[0] for stage in stages().values()]
    for image in images:
        if image not in stages():
            assert re.search(r":\d+\.\d+", image), image


def test_no_secret_stands_in_the_environment(project: dict[str, Any]) -> None:
    for name, service in project["services"].items():
        for key in service.get("environment") or {}:
            if re.search("PASSWORD|SECRET|TOKEN|ACCESS_KEY", key):
                assert key.endswith("_FILE"), f"{name}: {key}"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert not [rule for rule in ignored if rule.startswith("!") and "deploy/secrets".startswith(rule[1:])]


def test_every_file_the_dockerfile_copies_exists_and_reaches_the_builder() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [
        source
        for stage in stages().values()
        for copy in stage.get("COPY", ())
        if "--from=" not in copy
        for source in copy.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == rule or source.startswith(f"{rule}/") or Path(source).match(rule) for rule in allowed), (
            source
        )


def test_packages_are_installed_from_hashed_locks_only() -> None:
    installs = re.findall(r"pip install ([^\n&]*)", re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text()))
    assert installs
    for line in installs:
        assert "--require-hashes" in line
        lock = Path(line.split()[-1]).name
        text = (ROOT / "requirements" / lock).read_text()
        assert "--hash=sha256:" in text
        assert "://" not in text


@pytest.mark.parametrize("target", ["models", "triton-cpu"])
def test_onnx_runtime_sends_no_telemetry_from_our_images(target: str) -> None:
    assert "ORT_DISABLE_TELEMETRY=1" in " ".join(stages()[target]["ENV"])
