"""What callers see while parts are away, full, dead or wrongly configured; and that it comes back by itself."""

import json
import re
import shutil
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import GatewayFactory, TritonFactory
from tests.parts import Gateway, Triton, wait_until
from tests.rawhttp import connect, post
from tests.stubs import BUILT, DIE, SLEEP, SLEEP_S, STUB, write_stub

NARROW = "stub_narrow"  # its queue at Triton takes one request
GOOD = {"text": "a gorgeous, witty, seductive movie", "model": STUB}


@pytest.fixture(scope="module")
def stub_triton(triton_factory: TritonFactory, tmp_path_factory: pytest.TempPathFactory) -> Triton:
    """A Triton that tests may end and whose models they may take away."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in (STUB, NARROW):
        write_stub(folder, name, BUILT / "sentiment_model" / "tokenizer")
    config = folder / NARROW / "config.pbtxt"
    config.write_text(config.read_text().replace("max_queue_size: 64", "max_queue_size: 1"))
    return triton_factory(folder)


def call(gateway: Gateway, body: object, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{gateway.url}/predict", json=body, headers=names, timeout=30)


def unavailable(response: httpx.Response, code: str) -> None:
    assert response.status_code == 503, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["code"] == code
    assert 1 <= int(response.headers["retry-after"]) <= 30


def served(gateway: Gateway) -> bool:
    return call(gateway, GOOD).status_code == 200


def admitted(gateway: Gateway) -> float:
    found = re.search(rb"(?m)^twodoor_admitted_tokens (\S+)", gateway.get("/metrics"))
    assert found
    return float(found.group(1))


def test_triton_away_at_start_and_later_is_503_and_comes_back_by_itself(
    gateway_factory: GatewayFactory, stub_triton: Triton
) -> None:
    stub_triton.kill()
    gateway = gateway_factory(stub_triton.grpc_address, stub_triton.repository).start(triton_up=False)
    unavailable(call(gateway, GOOD), "dependency_down")
    assert json.loads(gateway.get("/readyz")) == {"dependencies": {"triton": "down"}}
    assert b'\ntwodoor_dependency_up{dependency="triton"} 0.0' in gateway.get("/metrics")
    gateway.get("/healthz")
    stub_triton.start()
    wait_until(lambda: served(gateway), "served after Triton came")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(call, gateway, {"text": SLEEP, "model": STUB})
        wait_until(lambda: admitted(gateway) > 0, "the call is at Triton", every_s=0.01)
        stub_triton.kill()
        unavailable(slow.result(), "dependency_down")
    unavailable(call(gateway, GOOD), "dependency_down")
    wait_until(lambda: b'"down"' in gateway.get("/readyz"), "readyz tells")
    stub_triton.start()
    wait_until(lambda: served(gateway), "served after Triton came back")
    assert b'"up"' in gateway.get("/readyz")
    assert b'\ntwodoor_dependency_up{dependency="triton"} 1.0' in gateway.get("/metrics")
    assert "Traceback" not in gateway.log()


def test_a_model_that_is_not_ready_is_503_until_it_is(gateway_factory: GatewayFactory, stub_triton: Triton) -> None:
    gateway = gateway_factory(stub_triton.grpc_address, stub_triton.repository).start()
    stub_triton.unload(STUB)
    try:
        unavailable(call(gateway, GOOD), "dependency_down")
        wait_until(lambda: "not ready" in call(gateway, GOOD).json()["detail"], "the registry notices")
    finally:
        stub_triton.load(STUB)
    wait_until(lambda: served(gateway), "served after the model came back")


def test_a_model_whose_process_died_is_503_and_served_after_a_restart(
    gateway_factory: GatewayFactory, stub_triton: Triton
) -> None:
    gateway = gateway_factory(stub_triton.grpc_address, stub_triton.repository).start()
    unavailable(call(gateway, {"text": f"a {DIE}", "model": STUB}), "dependency_down")
    unavailable(call(gateway, {"text": ["a", f"{DIE}", "b"], "model": STUB}), "dependency_down")
    stub_triton.restart()
    wait_until(lambda: served(gateway), "served after the restart")


def test_over_the_token_bound_a_call_is_503_and_later_served(
    gateway_factory: GatewayFactory, stub_triton: Triton
) -> None:
    gateway = gateway_factory(
        stub_triton.grpc_address, stub_triton.repository, TWODOOR_GATEWAY_MAX_ADMITTED_TOKENS=512
    ).start()
    long = "word " * 400
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(call, gateway, {"text": f"{SLEEP} {long}", "model": STUB})
        wait_until(lambda: admitted(gateway) > 400, "the slow call is admitted", every_s=0.01)
        unavailable(call(gateway, {"text": long, "model": STUB}), "overloaded")
        assert slow.result().status_code == 200
    assert served(gateway)
    wait_until(lambda: admitted(gateway) == 0, "tokens given back")
    assert b'twodoor_shed_total{reason="tokens"} 1.0' in gateway.get("/metrics")
    # A call larger than the whole bound is not refused for ever.
    assert call(gateway, {"text": [long] * 4, "model": STUB}).status_code == 200


def test_a_full_queue_at_triton_is_503_and_later_served(gateway_factory: GatewayFactory, stub_triton: Triton) -> None:
    # More at one time than the model's instances and queue take, as several gateways together may send.
    gateway = gateway_factory(stub_triton.grpc_address, stub_triton.repository, TWODOOR_GATEWAY_MAX_IN_FLIGHT=8).start()
    slow, quick = {"text": SLEEP, "model": NARROW}, {"text": "a", "model": NARROW}
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(call, gateway, slow)
        wait_until(lambda: admitted(gateway) > 0, "the slow call is at Triton", every_s=0.01)
        responses = list(pool.map(lambda _: call(gateway, quick), range(5)))
        assert first.result().status_code == 200
    refused = [response for response in responses if response.status_code != 200]
    assert refused
    for response in refused:
        unavailable(response, "overloaded")
    assert b'twodoor_shed_total{reason="queue_full"}' in gateway.get("/metrics")
    assert call(gateway, quick).status_code == 200


def test_over_the_byte_bound_a_call_is_503(gateway_factory: GatewayFactory, stub_triton: Triton) -> None:
    gateway = gateway_factory(
        stub_triton.grpc_address, stub_triton.repository, TWODOOR_GATEWAY_MAX_BUFFERED_BYTES=2**20
    ).start()
    unavailable(call(gateway, {"text": "word " * 220_000, "model": STUB}), "overloaded")
    assert served(gateway)


def executions(triton: Triton, model: str) -> int:
    """Return how many requests Triton has taken for a model, done and failed."""
    url = f"http://127.0.0.1:{triton.http_port}/v2/models/{model}/stats"
    with urllib.request.urlopen(url, timeout=5) as response:
        stats = json.load(response)["model_stats"][0]
    return int(stats["inference_stats"]["success"]["count"]) + int(stats["inference_stats"]["fail"]["count"])


def test_a_caller_who_left_costs_nothing_once_triton_is_done(
    gateway_factory: GatewayFactory, stub_triton: Triton
) -> None:
    gateway = gateway_factory(stub_triton.grpc_address, stub_triton.repository, TWODOOR_GATEWAY_MAX_IN_FLIGHT=1).start()
    before = executions(stub_triton, STUB)
    with connect(gateway.port) as first, connect(gateway.port) as second:
        first.send(post("/predict", json.dumps({"text": SLEEP, "model": STUB}).encode()))
        wait_until(lambda: admitted(gateway) > 0, "the first call is at Triton", every_s=0.01)
        alone = admitted(gateway)
        second.send(post("/predict", json.dumps(GOOD).encode()))
        wait_until(lambda: admitted(gateway) > alone, "the second call waits in line", every_s=0.01)
    # The second was never sent; the first is at Triton, holds its tokens and its place until it is done.
    wait_until(lambda: admitted(gateway) == alone, "the second call is dropped", timeout_s=SLEEP_S / 2, every_s=0.01)
    wait_until(lambda: admitted(gateway) == 0, "the first call is done")
    assert executions(stub_triton, STUB) == before + 1
    assert b'code="499",route="/predict"} 2.0' in gateway.get("/metrics")
    assert served(gateway)
    assert "Traceback" not in gateway.log()


def test_sigterm_lets_calls_in_flight_finish(gateway_factory: GatewayFactory, stub_triton: Triton) -> None:
    gateway = gateway_factory(stub_triton.grpc_address, stub_triton.repository).start()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(call, gateway, {"text": SLEEP, "model": STUB})
        wait_until(lambda: admitted(gateway) > 0, "the call is at Triton", every_s=0.01)
        gateway.send(signal.SIGTERM)
        assert slow.result().status_code == 200
    assert gateway.stop() == 0


def test_sigterm_ends_in_time_although_a_call_hangs(gateway_factory: GatewayFactory, stub_triton: Triton) -> None:
    gateway = gateway_factory(
        stub_triton.grpc_address, stub_triton.repository, TWODOOR_GATEWAY_SHUTDOWN_TIMEOUT_S=1
    ).start()
    with connect(gateway.port) as connection:
        connection.send(post("/predict", b'{"text": "a"}')[:-3])
        wait_until(lambda: gateway.get("/healthz") != b"", "the head has arrived")
        assert gateway.stop(timeout_s=6) == 0
        reply = connection.reply()
    assert (reply.status, reply.headers["content-type"]) == (503, "application/problem+json")
    assert int(reply.headers["retry-after"]) >= 1
    assert "Traceback" not in gateway.log()


# --- configuration


def test_a_wrong_model_config_ends_the_process_and_says_what_to_change(
    gateway_factory: GatewayFactory, triton_factory: TritonFactory, tmp_path: Path
) -> None:
    write_stub(tmp_path / "repository", "unbounded", BUILT / "sentiment_model" / "tokenizer")
    config = tmp_path / "repository" / "unbounded" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_queue_size: 64", "max_queue_size: 0"))
    triton = triton_factory(tmp_path / "repository")
    gateway = gateway_factory(triton.grpc_address, triton.repository)
    gateway.launch()
    assert gateway.child.wait(30) == 2
    last = gateway.log().strip().splitlines()[-1]
    assert last.startswith("gateway: model unbounded: ")
    assert "max_queue_size" in last
    assert "Traceback" not in gateway.log()
    triton.kill()


def test_a_tokenizer_that_is_not_the_configs_ends_the_process(
    gateway_factory: GatewayFactory, stub_triton: Triton, tmp_path: Path
) -> None:
    shutil.copytree(stub_triton.repository, tmp_path / "repository")
    (tmp_path / "repository" / STUB / "tokenizer" / "added.txt").write_text("x")
    gateway = gateway_factory(stub_triton.grpc_address, tmp_path / "repository")
    gateway.launch()
    assert gateway.child.wait(30) == 2
    assert "tokenizer_sha256" in gateway.log().strip().splitlines()[-1]


def test_a_misspelt_setting_is_warned_about(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    gateway = gateway_factory("127.0.0.1:1", tmp_path, TWODOOR_GATEWAY_PROT="1").start(triton_up=False)
    assert "TWODOOR_GATEWAY_PROT" in gateway.log()
    assert gateway.stop() == 0


def test_a_taken_port_ends_the_process_and_names_the_setting(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = gateway_factory("127.0.0.1:1", tmp_path, TWODOOR_GATEWAY_PORT=port).launch()
        assert gateway.child.wait(30) == 2
    assert f"TWODOOR_GATEWAY_PORT={port} cannot be used" in gateway.log().strip().splitlines()[-1]
