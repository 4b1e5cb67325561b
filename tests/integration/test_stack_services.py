"""The local stack on its real parts: one stack shared by all tests here, as `twodoor up` would start it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from local_stack import Stack
from local_stack.process import children, command_line, start_ticks
from tests.parts import ROOT, remove, wait_until
from tests.stubs import write_repository

# Starting every part on a busy machine takes a while.
pytestmark = pytest.mark.timeout(240)

ROW = {
    "inputs": [
        {"name": name, "shape": [1, 4], "datatype": "INT64", "data": data}
        for name, data in (("input_ids", [101, 2204, 2143, 102]), ("attention_mask", [1, 1, 1, 1]))
    ]
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Postgres, Kafka, Triton with sentiment_model and its twin, the gateway and two consumers."""
    folder = tmp_path_factory.mktemp("stack")
    repository = write_repository(folder / "repository", models=("sentiment_model",), stubs=())
    environment = {"TWODOOR_KAFKA_PARTITIONS": "3", "TWODOOR_STACK_CANARY_INTERVAL_S": "1"}
    with Stack(folder / "home", repository=repository, consumers=2, environment=environment) as running:
        yield running
    remove(repository)


def infer(stack: Stack, model: str) -> httpx.Response:
    """Run one row straight at Triton."""
    return httpx.post(f"http://{stack.triton_http}/v2/models/{model}/infer", json=ROW, timeout=20)


def stubs(stack: Stack, model: str) -> list[int]:
    """Return the pids of a model's processes."""
    return [pid for pid in children(stack.pid("triton")) if f"/{model}/" in "".join(command_line(pid)[1:2])]


def thread_stats(pid: int) -> list[list[str]]:
    """Return the fields of /proc/PID/task/*/stat behind the name, one list a thread."""
    return [(task / "stat").read_text().rsplit(")", 1)[1].split() for task in Path(f"/proc/{pid}/task").iterdir()]


def nice_values(pid: int) -> set[int]:
    """Return the nice value of every thread of a process."""
    return {int(fields[16]) for fields in thread_stats(pid)}


def nice_of_the_busiest_thread(pid: int) -> int:
    """Return the nice value of the thread that used most CPU time, user and system together."""
    return int(max(thread_stats(pid), key=lambda fields: int(fields[11]) + int(fields[12]))[16])


def said(stack: Stack, *words: str) -> Callable[[], bool]:
    """Whether the supervisor has said a line with all these words."""
    return lambda: any(all(word in line for word in words) for line in stack.lines())


def command(stack: Stack, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m local_stack` in the stack's environment."""
    return subprocess.run(
        [sys.executable, "-m", "local_stack", *arguments],
        env={**os.environ, **stack.environment, **settings}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_every_service_is_ready_and_answers(stack: Stack) -> None:
    assert {name: service.state for name, service in stack.status().items()} == dict.fromkeys(
        ("postgres", "kafka", "triton", "gateway", "consumer", "consumer-2"), "ready"
    )
    for name in ("gateway", "consumer", "consumer-2"):
        assert httpx.get(f"http://{stack.status()[name].address}/healthz").status_code == 200
        # Who calls as soon as the stack says "up" must not meet a door that has not seen its parts yet.
        assert set(httpx.get(f"http://{stack.status()[name].address}/readyz").json()["dependencies"].values()) == {"up"}
    assert infer(stack, "sentiment_model").status_code == 200


def test_all_processes_share_one_session_and_give_way_to_the_interactive_door(stack: Stack) -> None:
    interactive, bulk = stubs(stack, "sentiment_model"), stubs(stack, "sentiment_model_bulk")
    assert (len(interactive), len(bulk)) == (2, 2)
    wanted = {"gateway": {0}, "triton": {0}, "postgres": {5}, "kafka": {5}, "consumer": {10}, "consumer-2": {10}}
    assert {name: nice_values(stack.pid(name)) for name in wanted} == wanted
    assert [nice_values(pid) for pid in interactive] == [{0}, {0}]
    # The threads that work give way; the one by which the process tells Triton that it lives must not.
    assert [nice_of_the_busiest_thread(pid) for pid in bulk] == [19, 19]
    # The kernel compares nice values only inside a session.
    everybody = [stack.pid(name) for name in wanted] + interactive + bulk
    assert {os.getsid(pid) for pid in everybody} == {os.getsid(stack.supervisor_pid)}
    # Ctrl-C at a terminal must reach the supervisor alone.
    assert os.getpgid(stack.supervisor_pid) not in {os.getpgid(pid) for pid in everybody}


def test_nothing_listens_beyond_loopback(stack: Stack) -> None:
    ours = {s.process.pid for s in stack.status().values() if s.process}
    inodes = {str(fd.readlink())[8:-1] for pid in ours for fd in Path(f"/proc/{pid}/fd").iterdir() if _is_socket(fd)}
    listening = [line.split() for f in ("tcp", "tcp6") for line in Path(f"/proc/net/{f}").read_text().splitlines()[1:]]
    addresses = {row[1].split(":")[0] for row in listening if row[3] == "0A" and row[9] in inodes}
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert len(addresses) > 0


def _is_socket(fd: Path) -> bool:
    return str(fd.readlink()).startswith("socket:[")


async def test_the_topics_are_there_with_the_configured_partitions(stack: Stack) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=stack.kafka)
    await admin.start()
    try:
        topics = await admin.describe_topics(["twodoor.requests", "twodoor.results", "twodoor.requests.dlq"])
    finally:
        await admin.close()
    assert {t["topic"]: len(t["partitions"]) for t in topics} == {
        "twodoor.requests": 3, "twodoor.results": 3, "twodoor.requests.dlq": 1,
    }  # fmt: skip


def test_a_second_up_is_refused_in_one_line(stack: Stack) -> None:
    done = command(stack, "up")
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert "runs already" in done.stdout
    assert done.stderr == ""


def test_a_busy_port_is_named_with_its_setting(stack: Stack, tmp_path: Path) -> None:
    done = command(stack, "up", TWODOOR_HOME=str(tmp_path / "other"))
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert f"port {stack.triton_http.split(':')[1]} is in use" in done.stdout
    assert "TWODOOR_STACK_TRITON_HTTP_PORT" in done.stdout


@pytest.mark.parametrize("model", ["sentiment_model", "sentiment_model_bulk"])
def test_a_model_whose_process_was_killed_answers_again_while_the_other_goes_on(stack: Stack, model: str) -> None:
    other = "sentiment_model" if model.endswith("_bulk") else "sentiment_model_bulk"
    triton, others, old = stack.pid("triton"), stubs(stack, other), stubs(stack, model)
    os.kill(old[0], signal.SIGKILL)
    wait_until(said(stack, f"{model}: its process died; loading it again"), "death noticed", 10)
    assert infer(stack, other).status_code == 200
    wait_until(said(stack, f"{model}: ready again"), "model loaded again")
    for _ in range(2 * len(old)):  # every instance
        assert infer(stack, model).status_code == 200
    assert (stack.pid("triton"), stubs(stack, other)) == (triton, others)
    wait_until(lambda: not set(old) & set(stubs(stack, model)), "old instances ended", 20)
    assert len(stubs(stack, model)) == len(old)


def test_a_crashed_service_is_started_again_and_said_in_one_line(stack: Stack) -> None:
    pid = stack.pid("gateway")
    os.kill(pid, signal.SIGKILL)
    stack.wait_ready("gateway", other_than=pid)
    assert stack.status()["gateway"].restarts >= 1
    assert sum("gateway was killed by SIGKILL; starting it again in 0.2 s" in line for line in stack.lines()) == 1
    assert httpx.get(f"{stack.gateway_url}/healthz").status_code == 200


def test_a_service_can_be_stopped_for_a_while_and_restarted(stack: Stack) -> None:
    stack.stop_service("kafka")
    assert stack.status()["kafka"].state == "stopped"
    assert httpx.get(f"{stack.gateway_url}/healthz").status_code == 200
    stack.start_service("kafka")
    old = stack.pid("consumer-2")
    stack.restart("consumer-2")
    assert stack.pid("consumer-2") != old
    assert all(service.state == "ready" for service in stack.status().values())


def test_down_from_another_process_ends_everything_within_20_seconds(stack: Stack) -> None:
    """The last test here: it takes the shared stack down."""
    pids = [s.process.pid for s in stack.status().values() if s.process] + children(stack.pid("triton"))
    assert len(pids) == 6 + 4
    started = time.monotonic()
    done = command(stack, "down")
    assert (done.returncode, done.stdout) == (0, "the stack is down\n")
    assert time.monotonic() - started < 20
    assert [pid for pid in pids if start_ticks(pid)] == []
    assert {service.state for service in stack.status().values()} == {"stopped"}
    assert command(stack, "down").stdout == "the stack is not running\n"
