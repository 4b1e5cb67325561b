"""compose.yaml without a Docker engine: parsed by Compose itself, and its variables read by our settings classes."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from serving import settings
from serving.settings import Settings
from tests.unit.compose_project import (
    COMPOSE,
    OWN,
    ROOT,
    TIERS,
    Service,
    command_of,
    composed,
    reachable_names,
)

READS: dict[str, tuple[type[Settings], ...]] = {
    "gateway": (
        settings.GatewaySettings,
        settings.JobsSettings,
        settings.TritonSettings,
        settings.ModelSettings,
        settings.TelemetrySettings,
    ),
    "consumer": (
        settings.ConsumerSettings,
        settings.JobsSettings,
        settings.KafkaSettings,
        settings.TritonSettings,
        settings.ModelSettings,
        settings.TelemetrySettings,
    ),
    "models-gpu": (settings.ModelSettings,),
    "models-cpu": (settings.ModelSettings,),
    "topics": (settings.KafkaSettings,),
    "migrate": (settings.JobsSettings,),
    "bucket": (settings.JobsSettings,),
}
STORES = ("topics", "migrate", "bucket")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return composed()


@pytest.fixture(scope="module")
def services(project: dict[str, Any]) -> dict[str, Service]:
    return dict(project["services"])


@pytest.mark.parametrize("profile", TIERS)
def test_compose_accepts_each_profile_alone(profile: str) -> None:
    assert composed(profiles=(profile,))["services"]


def test_without_a_profile_nothing_starts() -> None:
    assert not composed(profiles=())["services"]


def test_compose_accepts_the_overlay_for_producers_on_the_host_and_it_stays_on_loopback() -> None:
    kafka = composed(COMPOSE, ROOT / "deploy/compose.kafka-host.yaml")["services"]["kafka"]
    assert [port["host_ip"] for port in kafka["ports"]] == ["127.0.0.1"]
    assert kafka["environment"]["KAFKA_LOG_DIRS"] == "/var/lib/kafka/data"


@pytest.mark.parametrize("name", READS)
def test_our_settings_accept_exactly_what_a_service_is_given(
    name: str, services: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {key: str(value) for key, value in (services[name].get("environment") or {}).items()}
    for key in [key for key in os.environ if key.startswith("TWODOOR_")]:
        monkeypatch.delenv(key)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    for cls in READS[name]:
        settings.load(cls)
    assert settings.unknown_variables(given) == []
    for secret in services[name].get("secrets") or ():
        assert secret["target"] in {"TWODOOR_JOBS_DATABASE_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    known = {variable for cls in READS[name] for variable in settings.env_names(cls).values()}
    assert {key for key in given if key.startswith("TWODOOR_")} <= known


def test_topics_and_consumer_are_given_the_same_kafka_settings(services: dict[str, Service]) -> None:
    names = set(settings.env_names(settings.KafkaSettings).values())
    topics, consumer = (
        {k: v for k, v in services[n]["environment"].items() if k in names} for n in ("topics", "consumer")
    )
    assert topics == consumer
    script = (ROOT / "deploy/kafka/create-topics.sh").read_text()
    assert set(re.findall(r"TWODOOR_\w+", script)) == set(topics)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["gateway", "consumer"])
def test_addresses_name_a_service_of_a_network_both_are_in(name: str, tier: str) -> None:
    services = composed(profiles=(tier,))["services"]
    environment, networks = services[name]["environment"], services[name]["networks"]
    names = set().union(*(reachable_names(services, network) for network in networks))
    addresses = {key: value for key, value in environment.items() if key.endswith(("_ADDRESS", "_SERVERS"))}
    assert addresses
    for address in addresses.values():
        host, _, port = address.rpartition(":")
        assert host in names
        assert int(port) in (8001, 9092)
    store = urlsplit(environment["TWODOOR_JOBS_OBJECTS_ENDPOINT"])
    assert (store.hostname in names, store.port) == (True, 8333)
    assert store.scheme == "https" or environment["TWODOOR_JOBS_OBJECTS_ALLOW_HTTP"] == "true"


def test_the_broker_tells_clients_the_address_the_doors_are_given(services: dict[str, Service]) -> None:
    told = services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert told == f"PLAINTEXT://{services['consumer']['environment']['TWODOOR_KAFKA_BOOTSTRAP_SERVERS']}"


def test_gpu_models_are_fp16_and_cpu_models_int8(services: dict[str, Service]) -> None:
    assert "fp16" in services["models-gpu"]["command"]
    assert "int8" in services["models-cpu"]["command"]


def test_both_tiers_serve_the_repository_the_doors_read_and_the_builder_writes(services: dict[str, Service]) -> None:
    wanted = settings.env_names(settings.ModelSettings)["repository"]
    paths = {services[name]["environment"][wanted] for name in READS if name not in STORES}
    for name in ("triton-gpu", "triton-cpu"):
        arguments = services[name].get("command") or command_of(services, name)
        paths |= {a.partition("=")[2] for a in arguments if a.startswith("--model-repository=")}
    assert len(paths) == 1
    mounts = {volume["target"] for name in OWN for volume in services[name]["volumes"] if volume["source"] == "models"}
    # A model is written beside the repository and moved into it, so both must be in one volume.
    assert mounts == {str(Path(paths.pop()).parent)}


def test_start_order_is_models_then_triton_then_doors_and_kafka_then_topics_then_consumer(
    services: dict[str, Service],
) -> None:
    def after(name: str) -> dict[str, str]:
        return {other: how["condition"] for other, how in services[name].get("depends_on", {}).items()}

    for tier in TIERS:
        assert after(f"triton-{tier}") == {f"models-{tier}": "service_completed_successfully"}
        assert after("gateway")[f"triton-{tier}"] == "service_healthy"
    assert after("topics") == {"kafka": "service_healthy"}
    assert after("consumer")["topics"] == "service_completed_successfully"
    assert after("migrate") == {"postgres": "service_healthy"}
    assert after("bucket") == {"objects": "service_healthy"}
    assert {after("consumer")[name] for name in ("migrate", "bucket")} == {"service_completed_successfully"}
    # /predict needs Triton only, but a door does not start on a database that lacks what its code needs.
    assert after("gateway")["migrate"] == "service_completed_successfully"
    assert after("gateway").keys() == {"migrate", *(f"triton-{tier}" for tier in TIERS)}


def test_only_the_gateway_is_published_and_only_on_loopback(services: dict[str, Service]) -> None:
    published = {name: service["ports"] for name, service in services.items() if service.get("ports")}
    assert list(published) == ["gateway"]
    assert [port["host_ip"] for port in published["gateway"]] == ["127.0.0.1"]


def test_what_is_not_published_has_no_way_out_but_the_model_builder(project: dict[str, Any]) -> None:
    assert project["networks"]["back"]["internal"] is True
    outside = {name for name, service in project["services"].items() if set(service["networks"]) != {"back"}}
    assert outside == {"gateway", "models-gpu", "models-cpu"}


def test_made_secrets_open_what_the_services_ask_for_and_stay_the_same(
    services: dict[str, Service], tmp_path: Path
) -> None:
    script = tmp_path / "make-secrets.sh"
    script.write_text((ROOT / "deploy/make-secrets.sh").read_text())

    def made() -> dict[str, str]:
        done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=20, check=True)
        found = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
        assert not [value for value in found.values() if value in done.stdout + done.stderr]
        return found

    secrets = made()
    assert made() == secrets
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    own = "postgresql://me:secret@db.example:6432/ledger"
    (tmp_path / "secrets" / "database_url").write_text(own)
    assert made()["database_url"] == own
    assert set(secrets) == {Path(s["file"]).name for s in composed()["secrets"].values()}
    url, postgres = urlsplit(secrets["database_url"]), services["postgres"]["environment"]
    assert (url.scheme, url.hostname, url.port) == ("postgresql", "postgres", 5432)
    assert (url.username, url.path) == (postgres["POSTGRES_USER"], f"/{postgres['POSTGRES_DB']}")
    assert url.password == secrets["postgres_password"]
    (identity,) = json.loads(secrets["objects_identities"])["identities"]
    keys = {"accessKey": secrets["objects_access_key"], "secretKey": secrets["objects_secret_key"]}
    assert identity["credentials"] == [keys]


def test_both_doors_and_the_one_shots_get_the_secrets_they_need_as_files(services: dict[str, Service]) -> None:
    def variables(name: str) -> dict[str, str]:
        return {secret["target"]: secret["source"] for secret in services[name]["secrets"]}

    database = {"TWODOOR_JOBS_DATABASE_URL": "database_url"}
    store = {"AWS_ACCESS_KEY_ID": "objects_access_key", "AWS_SECRET_ACCESS_KEY": "objects_secret_key"}
    assert variables("gateway") == variables("consumer") == {**database, **store}
    assert (variables("migrate"), variables("bucket")) == (database, store)


def test_the_overlay_with_keys_closes_the_door() -> None:
    gateway = composed(COMPOSE, ROOT / "deploy/compose.keys.yaml")["services"]["gateway"]
    environment = gateway["environment"]
    assert environment["TWODOOR_GATEWAY_ALLOW_OPEN"] == "false"
    assert environment["TWODOOR_GATEWAY_KEYS_FILE"] in {secret["target"] for secret in gateway["secrets"]}
    assert {"TWODOOR_JOBS_DATABASE_URL", "AWS_ACCESS_KEY_ID"} <= {s["target"] for s in gateway["secrets"]}
