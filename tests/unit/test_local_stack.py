"""The parts of the local stack that need no server: settings, ports, state folder, remains, jars, the backend's rules."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from local_stack import StackConfig, kafka, postgres, stack_environment, triton
from local_stack.api import doubts, down, log_path, status, up
from local_stack.ask import post_json
from local_stack.install import checksums, difference, ensure_kafka
from local_stack.kafka import cluster_id
from local_stack.logs import tail, trim
from local_stack.ports import PortUse, check_free, free_ports
from local_stack.process import Identity, boot_id, command_line, identify, start_ticks
from local_stack.state import AlreadyRunning, ServiceRecord, StackRecord, StateFolder
from local_stack.supervisor import clear_remains
from local_stack.triton.canary import Canary, Progress
from serving.errors import ConfigError

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv("TWODOOR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def sleeper() -> "subprocess.Popen[bytes]":
    """A process in a group of its own, as a service is; it has become what it was started as."""
    process = subprocess.Popen(SLEEP, process_group=0)
    deadline = time.monotonic() + 10
    while command_line(process.pid) != SLEEP:
        assert time.monotonic() < deadline
    return process


def record_of(process: Identity, command: list[str], folder: StateFolder, phase: str = "up") -> None:
    """Write the state a killed supervisor leaves: itself gone, one service as given."""
    gone = Identity(2**22 - 1, 1, boot_id())
    service = ServiceRecord("kafka", "127.0.0.1:1", "ready", process, command)
    folder.create()
    folder.write(StackRecord(gone, phase, [service]))  # type: ignore[arg-type]


def remains_in(folder: StateFolder) -> StackRecord:
    """Return what the folder says was left."""
    record = folder.read()
    assert record is not None
    return record


def test_names_ports_and_addresses_follow_the_settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWODOOR_STACK_KAFKA_PORT", "19092")
    config = StackConfig.load(consumers=3)
    assert config.names == ["postgres", "kafka", "triton", "gateway", "consumer", "consumer-2", "consumer-3"]
    assert config.address("consumer-3") == "127.0.0.1:8085"
    assert PortUse(8085, "TWODOOR_CONSUMER_PORT (consumer-3)") in config.ports()
    environment = stack_environment(config)
    assert environment["TWODOOR_KAFKA_BOOTSTRAP_SERVERS"] == "127.0.0.1:19092"
    assert environment["TWODOOR_TRITON_GRPC_ADDRESS"] == "127.0.0.1:8001"
    assert Path(environment["TWODOOR_MODELS_REPOSITORY"]).is_absolute()


def test_a_subset_of_services_keeps_its_order_and_an_unknown_one_is_refused(home: Path) -> None:
    assert StackConfig.load(services=("triton", "kafka")).names == ["kafka", "triton"]
    with pytest.raises(ConfigError, match="no such service: redis"):
        StackConfig.load(services=("redis",))
    with pytest.raises(ConfigError, match="0 to 16"):
        StackConfig.load(consumers=17)


def test_doors_are_told_where_jobs_are_kept(home: Path) -> None:
    environment = stack_environment(StackConfig.load())
    url = urlsplit(environment["TWODOOR_JOBS_DATABASE_URL"])
    assert (url.hostname, url.port, url.path) == ("127.0.0.1", 5433, "/twodoor")
    assert url.password == (home / "postgres" / "password").read_text()
    assert environment["TWODOOR_JOBS_OBJECTS_URL"] == f"file://{home}/objects"
    # It makes its password once, and in a folder that is closed to others.
    assert stack_environment(StackConfig.load()) == environment
    assert home.stat().st_mode & 0o077 == 0


def test_without_a_database_doors_keep_no_jobs(home: Path) -> None:
    environment = stack_environment(StackConfig.load(services=("triton", "gateway")))
    assert not [name for name in environment if name.startswith("TWODOOR_JOBS_")]
    assert not home.exists()


def test_with_a_database_of_the_users_own_none_is_started(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWODOOR_JOBS_DATABASE_URL", "postgresql://me:secret@db.example:5432/mine")
    config = StackConfig.load()
    assert config.names == ["kafka", "triton", "gateway", "consumer"]
    environment = stack_environment(config)
    assert "TWODOOR_JOBS_DATABASE_URL" not in environment  # the one that is set stays
    assert environment["TWODOOR_JOBS_OBJECTS_URL"] == f"file://{home}/objects"
    monkeypatch.setenv("TWODOOR_JOBS_OBJECTS_URL", "s3://bucket")
    assert "TWODOOR_JOBS_OBJECTS_URL" not in stack_environment(config)


def test_the_environment_of_a_stack_is_no_database_of_the_users_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWODOOR_JOBS_DATABASE_URL", stack_environment(StackConfig.load())["TWODOOR_JOBS_DATABASE_URL"])
    assert StackConfig.load().names[0] == "postgres"


def test_without_the_package_postgres_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="make setup"):
        postgres.program("postgres")


def test_a_taken_port_is_named_with_its_setting_and_its_owner() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is in use by .* \(pid \d+\).*TWODOOR_X_PORT"):
            check_free([PortUse(port, "TWODOOR_X_PORT")])


def test_two_settings_with_the_same_port_are_named() -> None:
    port = free_ports(1)[0]
    with pytest.raises(ConfigError, match=f"TWODOOR_B and TWODOOR_A are both {port}"):
        check_free([PortUse(port, "TWODOOR_A"), PortUse(port, "TWODOOR_B")])


@pytest.mark.parametrize(
    ("variable", "folder", "service", "sentence"),
    [
        ("TWODOOR_HOME", "my home", "triton", "from a path with ' ' in it"),
        ("TWODOOR_MODELS_REPOSITORY", "models(new)", "triton", r"from a path with '\(' in it"),
        ("TWODOOR_HOME", "a,b", "kafka", "Kafka takes a comma"),
    ],
)
def test_a_path_that_a_part_would_hang_on_is_refused_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, folder: str, service: str, sentence: str
) -> None:
    monkeypatch.setenv(variable, str(home.parent / folder))
    with pytest.raises(ConfigError, match=f"{sentence}.*set {variable}"):
        StackConfig.load().check_paths()
    said: list[str] = []
    assert up(services=(service,), report=said.append) == 1
    assert said[-1].startswith("cannot start: ")
    assert variable in said[-1]
    others = ("postgres",) if service == "kafka" else ("postgres", "kafka")
    StackConfig.load(services=others).check_paths()


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(9)
    assert len(set(ports)) == 9
    check_free([PortUse(port, f"S{port}") for port in ports])


def test_only_one_supervisor_owns_a_state_folder(home: Path) -> None:
    folder = StateFolder(home)
    with folder.locked():
        assert folder.is_locked()
        with pytest.raises(AlreadyRunning, match="runs already"), StateFolder(home).locked():
            pass
    assert not folder.is_locked()


def test_state_survives_the_file_and_a_damaged_file_counts_as_none(home: Path) -> None:
    folder = StateFolder(home)
    me = Identity(1, 2, "boot")
    record = StackRecord(me, "up", [ServiceRecord("triton", "a:1", "ready", me, ["x"], 2), ServiceRecord("kafka", "")])
    folder.create()
    assert folder.read() is None
    folder.write(record)
    assert folder.read() == record
    (home / "state.json").write_text('{"supervisor": ')
    assert folder.read() is None


def test_the_state_folder_is_for_its_owner_only(home: Path) -> None:
    StateFolder(home).create()
    assert home.stat().st_mode & 0o077 == 0


def test_remains_of_a_killed_stack_are_ended_and_named(home: Path) -> None:
    folder = StateFolder(home)
    with sleeper() as process:
        identity = identify(process.pid)
        assert identity is not None
        record_of(identity, SLEEP, folder)
        assert status()["services"][0] | {"pid": process.pid, "state": "orphaned"} == status()["services"][0]
        said: list[str] = []
        clear_remains(remains_in(folder), StackConfig.load(), said.append)
        assert process.wait(5) == -signal.SIGTERM
    assert said == [f"ended what a killed stack had left running: kafka ({process.pid})"]


def test_a_stranger_with_a_recorded_pid_is_left_alone(home: Path) -> None:
    folder = StateFolder(home)
    with sleeper() as process:
        identity = identify(process.pid)
        assert identity is not None
        strangers = [
            (replace(identity, started=identity.started - 1), SLEEP),
            (replace(identity, boot="another boot"), SLEEP),
            (identity, ["/usr/bin/java", "kafka.Kafka"]),
        ]
        for stranger, command in strangers:
            record_of(stranger, command, folder)
            said: list[str] = []
            clear_remains(remains_in(folder), StackConfig.load(), said.append)
            assert said == ["the last stack was killed; nothing of it is left running"]
            assert down(said.append) == 0
            assert said[1:] == ["the stack is not running"]
        assert process.poll() is None
        process.kill()


def test_down_ends_what_a_killed_supervisor_left(home: Path) -> None:
    with sleeper() as process:
        identity = identify(process.pid)
        assert identity is not None
        record_of(identity, SLEEP, StateFolder(home))
        said: list[str] = []
        assert down(said.append) == 0
        assert process.wait(5) == -signal.SIGTERM
    assert said == ["stopped what a killed supervisor had left running: kafka"]


def test_after_an_orderly_end_nothing_is_said(home: Path) -> None:
    folder = StateFolder(home)
    record_of(Identity(2**22 - 1, 1, boot_id()), SLEEP, folder, phase="stopped")
    said: list[str] = []
    clear_remains(remains_in(folder), StackConfig.load(), said.append)
    assert said == []


def test_a_zombie_counts_as_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 10
    while start_ticks(process.pid) is not None:
        assert time.monotonic() < deadline
    process.wait()


def test_a_child_ends_with_its_parent_and_has_its_priority() -> None:
    code = (
        "import subprocess, sys; from local_stack.process import wrapped\n"
        "child = subprocess.Popen(wrapped([sys.executable, '-c', "
        "'import os, sys, time; print(os.getpid(), os.nice(0), flush=True); time.sleep(60)'], 5))\n"
        "child.wait()"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, nice = (int(word) for word in parent.stdout.readline().split())
        parent.kill()
        deadline = time.monotonic() + 10
        while start_ticks(pid) is not None:
            assert time.monotonic() < deadline
    assert nice == 5


def test_status_without_a_stack_shows_every_configured_service_as_stopped(home: Path) -> None:
    services = status()["services"]
    assert [s["name"] for s in services] == ["postgres", "kafka", "triton", "gateway", "consumer"]
    assert {(s["state"], s["pid"]) for s in services} == {("stopped", None)}
    assert set(services[0]) == {"name", "state", "pid", "address"}


def test_a_wrong_setting_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWODOOR_STACK_KAFKA_PORT", "no")
    said: list[str] = []
    assert up(report=said.append) == 1
    assert len(said) == 1
    assert "TWODOOR_STACK_KAFKA_PORT" in said[0]


def test_an_unknown_log_names_those_there_are(home: Path) -> None:
    folder = StateFolder(home)
    folder.create()
    (folder.logs / "kafka.log").write_text("hello\n")
    assert log_path("kafka").read_text() == "hello\n"
    with pytest.raises(ConfigError, match="no log of 'nobody'; there are kafka"):
        log_path("nobody")


def test_a_log_over_its_bound_is_kept_once_and_emptied_in_place(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 100)
        trim(log, 1000)
        assert log.stat().st_size == 400
        trim(log, 100)
        writer.write(b"new\n\n")
    assert (tmp_path / "a.log.1").stat().st_size == 400
    assert log.read_text() == "new\n\n"
    assert tail(log) == ["new"]
    assert tail(tmp_path / "none.log") == []


def test_a_cluster_id_never_looks_like_an_option() -> None:
    ids = {cluster_id() for _ in range(500)}
    assert len(ids) == 500
    assert all(len(i) == 22 and not i.startswith("-") for i in ids)


def test_the_recorded_jars_are_those_of_the_pom_and_a_wrong_or_missing_one_is_named(tmp_path: Path) -> None:
    wanted = checksums()
    assert {"kafka_2.13-4.2.2.jar", "log4j-slf4j-impl-2.25.5.jar", "log4j-core-2.25.5.jar"} <= set(wanted)
    assert all(len(digest) == 64 for digest in wanted.values())
    assert "missing" in str(difference(tmp_path, wanted))
    (tmp_path / "a.jar").write_bytes(b"x")
    assert difference(tmp_path, {"a.jar": "0" * 64}) == "a.jar has another SHA-256"


def test_a_fetched_kafka_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name in checksums():
        (tmp_path / name).touch()
    ensure_kafka(tmp_path)
    (tmp_path / name).unlink()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="apt-get install maven"):
        ensure_kafka(tmp_path)


@pytest.mark.parametrize(
    ("noted", "checkpoint", "is_read"),
    [
        ("4.2.2", True, True),
        ("4.2.9", True, True),
        ("3.9.1", False, True),
        ("4.4.0", True, False),
        ("", True, True),
        ("", False, False),
    ],
)
def test_records_of_a_newer_kafka_are_told_instead_of_failing_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: str, checkpoint: bool, is_read: bool
) -> None:
    monkeypatch.setenv("TWODOOR_HOME", str(tmp_path))
    monkeypatch.setenv("TWODOOR_STACK_KAFKA_LIBS", str(tmp_path / "libs"))
    data = tmp_path / "kafka" / "data"
    for folder in (data, tmp_path / "libs"):
        folder.mkdir(parents=True)
    (tmp_path / "libs" / "kafka_2.13-4.2.2.jar").touch()
    (data / "meta.properties").touch()
    (tmp_path / "kafka" / "formatted").write_text(noted)
    if checkpoint:
        (data / "bootstrap.checkpoint").touch()
    if is_read:
        kafka.prepare(StackConfig.load())
    else:
        with pytest.raises(ConfigError, match=r"kafka holds the records of Kafka 4\.4.*4\.2\.2 cannot read"):
            kafka.prepare(StackConfig.load())
    assert data.is_dir()


def test_kafka_starts_from_the_archive_of_its_classes_where_there_is_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWODOOR_STACK_KAFKA_LIBS", str(tmp_path / "libs"))
    assert not any("SharedArchiveFile" in part for part in kafka.command(StackConfig.load()))
    (tmp_path / "kafka.jsa").touch()
    assert f"-XX:SharedArchiveFile={tmp_path / 'kafka.jsa'}" in kafka.command(StackConfig.load())


def test_without_java_in_the_path_kafka_runs_on_the_packaged_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert (kafka.java_version(kafka.java()) or 0) >= 17


def test_an_empty_repository_and_a_missing_environment_say_what_to_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWODOOR_MODELS_REPOSITORY", str(tmp_path))
    with pytest.raises(ConfigError, match="twodoor models build"):
        triton.prepare(StackConfig.load())
    with pytest.raises(ConfigError, match="make setup"):
        triton.Installation.find(tmp_path / "no-venv")


def test_two_stacks_never_share_the_name_of_their_shared_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = triton.shared_memory_prefix(StackConfig.load())
    monkeypatch.setenv("TWODOOR_HOME", str(home / "other"))
    second = triton.shared_memory_prefix(StackConfig.load())
    assert not first.startswith(second)
    assert not second.startswith(first)


def test_a_canary_is_sent_with_the_models_types_and_compared_within_its_tolerance(tmp_path: Path) -> None:
    data = {"inputs": {"ids": [1, 2]}, "output": {"name": "out", "values": [0.5, 1.0], "tolerance": 0.05}}
    (tmp_path / "canary.json").write_text(json.dumps(data))
    canary = Canary.read(tmp_path / "canary.json")
    assert canary is not None
    assert canary.request({"inputs": [{"name": "ids", "datatype": "INT32"}]}) == {
        "inputs": [{"name": "ids", "shape": [1, 2], "datatype": "INT32", "data": [1, 2]}],
        "outputs": [{"name": "out"}],
    }
    answers = {(0.52, 1.0): False, (0.56, 1.0): True, (float("nan"), 1.0): True, (0.5,): True}
    for values, differs in answers.items():
        assert canary.differs({"outputs": [{"name": "out", "data": list(values)}]}) is differs
    assert Canary.read(tmp_path / "none.json") is None


def test_a_model_that_gets_something_done_is_not_silent_however_long_it_lets_the_canary_wait() -> None:
    progress = Progress(timeout_s=0.0)
    assert progress.silent
    busy = Progress(timeout_s=60.0)
    assert not busy.moved(7)
    assert busy.moved(8)
    assert not busy.moved(8)
    assert not busy.silent


def test_a_group_signal_never_reaches_a_stranger_who_got_the_pid(home: Path) -> None:
    with sleeper() as process:
        identity = identify(process.pid)
        assert identity is not None
        replace(identity, started=identity.started - 1).signal_group(signal.SIGKILL)
        replace(identity, boot="another boot").signal_group(signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        identity.signal_group(signal.SIGKILL)
        assert process.wait(5) == -signal.SIGKILL


def test_a_look_at_the_lock_does_not_make_up_believe_that_a_stack_runs(home: Path) -> None:
    folder = StateFolder(home)
    folder.create()
    with (home / "lock").open("a") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        timer = threading.Timer(0.2, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        timer.start()
        with folder.locked():
            assert folder.is_locked()
        timer.join()


def test_while_up_clears_what_was_left_the_supervisor_can_be_found_and_the_remains_too(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(home)
    seen: list[StackRecord | None] = []
    monkeypatch.setattr(triton, "clean_shared_memory", lambda _: seen.append(folder.read()))
    with sleeper() as process, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("TWODOOR_GATEWAY_PORT", str(taken.getsockname()[1]))
        identity = identify(process.pid)
        assert identity is not None
        record_of(identity, SLEEP, folder)
        said: list[str] = []
        assert up(services=("gateway",), report=said.append) == 1
        assert process.wait(5) == -signal.SIGTERM
    (during,) = seen
    assert during is not None
    assert during.supervisor == identify(os.getpid())
    assert [(service.process, service.state) for service in during.services] == [(identity, "orphaned")]
    assert "in use" in said[-1]
    after = folder.read()
    assert after is not None
    assert after.phase == "stopped"


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", "3", '{"inputs": {}, "output": {"name": "logits"}}', '{"inputs": [], "output": []}', "\xff"],
)
def test_a_canary_that_is_none_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "canary.json"
    path.write_bytes(content.encode("latin-1"))
    assert Canary.read(path) is None
    assert Canary.read(tmp_path / "missing") is None


async def test_an_answer_that_is_no_json_is_no_answer() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"<html>"))
    async with httpx.AsyncClient(transport=transport) as http:
        with pytest.raises(httpx.HTTPError):
            await post_json(http, "http://x/", {}, 1)


def test_what_is_most_often_a_typing_error_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_model").mkdir()
    (tmp_path / "some_model" / "config.pbtxt").touch()
    monkeypatch.setenv("TWODOOR_MODELS_REPOSITORY", str(tmp_path))
    monkeypatch.setenv("TWODOOR_GATEWAY_PROT", "1")
    misspelt, missing = doubts(StackConfig.load())
    assert "TWODOOR_GATEWAY_PROT" in misspelt
    assert "no model sentiment_model" in missing


def test_a_store_that_others_may_use_is_told_before_the_local_ledger_sweeps_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> list[str]:
        return [doubt for doubt in doubts(StackConfig.load()) if "OBJECTS_URL" in doubt]

    monkeypatch.setenv("TWODOOR_JOBS_OBJECTS_URL", "s3://production/jobs")
    (doubt,) = told()
    assert "is deleted" in doubt
    monkeypatch.setenv("TWODOOR_JOBS_OBJECTS_URL", (home / "objects").as_uri())
    assert told() == []
    monkeypatch.setenv("TWODOOR_JOBS_OBJECTS_URL", "s3://production/jobs")
    monkeypatch.setenv("TWODOOR_JOBS_DATABASE_URL", "postgresql://ledger.example/twodoor")
    assert told() == []
