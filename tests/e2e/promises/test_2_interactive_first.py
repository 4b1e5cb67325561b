"""Promise 2: bulk work has a lane of its own, and the operating system puts that lane behind every other."""

import os
import re
import urllib.request
from pathlib import Path

from local_stack.stack import Stack
from tests.e2e.topics import assert_each_once_in_order, produce, read_results, results_end


def inferences(stack: Stack, model: str) -> int:
    """Return how many rows a Triton model has answered."""
    with urllib.request.urlopen(f"http://{stack.triton_metrics}/metrics", timeout=5) as response:
        text = response.read().decode()
    found = re.search(rf'^nv_inference_count{{model="{model}",version="1"}} (\d+)', text, re.M)
    return int(found.group(1)) if found else 0


def nice_of(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def session_of(pid: int) -> int:
    return os.getsid(pid)


def stubs_of(triton_pid: int) -> dict[int, str]:
    """Return pid → command line of the model processes under a Triton."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if "triton_python_backend_stub" in command and parent == triton_pid:
            found[int(folder.name)] = command
    return found


async def test_bulk_rows_reach_the_twin_and_never_the_first_instance(stack: Stack) -> None:
    start = await results_end(stack.kafka)
    before = {name: inferences(stack, name) for name in ("sentiment_model", "sentiment_model_bulk")}
    ids = {f"lane-{number}" for number in range(200)}
    await produce(stack.kafka, ({"id": one, "model": "sentiment_model", "text": f"{one} goes behind"} for one in ids))
    assert_each_once_in_order(await read_results(stack.kafka, start, ids, timeout_s=60), ids)
    assert inferences(stack, "sentiment_model_bulk") - before["sentiment_model_bulk"] >= 200
    # The first instance saw nothing but the supervisor's own canary rows.
    assert inferences(stack, "sentiment_model") - before["sentiment_model"] < 100


def test_everything_of_the_bulk_side_runs_at_a_lower_os_priority_in_one_session(stack: Stack) -> None:
    triton = stack.pid("triton")
    stubs = stubs_of(triton)
    assert stubs, "no model processes found"
    bulk = {pid for pid, command in stubs.items() if "_bulk_" in command}
    first = stubs.keys() - bulk
    assert bulk
    assert first
    assert {nice_of(pid) for pid in bulk if "stub_faulty" not in stubs[pid]} == {19}
    assert {nice_of(pid) for pid in first} == {0}
    gateway, consumer, kafka, postgres = (stack.pid(name) for name in ("gateway", "consumer", "kafka", "postgres"))
    assert nice_of(gateway) == 0
    assert nice_of(consumer) > 0
    assert nice_of(kafka) > 0
    assert nice_of(postgres) > 0
    # nice counts only among processes of one session where the kernel groups sessions (autogroup).
    assert len({session_of(pid) for pid in (triton, gateway, consumer, kafka, *stubs)}) == 1
