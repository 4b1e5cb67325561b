"""A gateway whose Triton is scaled to zero: 503 with Retry-After, demand an autoscaler can read, and service once it is there."""

import re
from pathlib import Path

import httpx

from tests.conftest import GatewayFactory, TritonFactory
from tests.parts import Gateway, wait_until
from tests.stubs import BUILT, STUB, write_stub

WINDOW_S = 1.5


def call(gateway: Gateway, body: object) -> httpx.Response:
    return httpx.post(f"{gateway.url}/predict", json=body, timeout=30)


def demand(gateway: Gateway) -> dict[str, float]:
    found = re.findall(rb'(?m)^twodoor_demand_rows\{model="([^"]+)"\} (\S+)', gateway.get("/metrics"))
    return {name.decode(): float(rows) for name, rows in found}


def phases(gateway: Gateway) -> list[str]:
    return re.findall(r'"phase": "(\w+)", "seconds": [0-9.]+, "age_s": [0-9.]+', gateway.log())


def test_demand_shows_while_triton_is_scaled_to_zero_and_is_served_once_it_is_there(
    triton_factory: TritonFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    write_stub(tmp_path, STUB, BUILT / "sentiment_model" / "tokenizer")
    triton = triton_factory(tmp_path)
    triton.kill()
    settings = {"TWODOOR_MODELS_DEFAULT": STUB, "TWODOOR_GATEWAY_DEMAND_WINDOW_S": WINDOW_S}
    gateway = gateway_factory(triton.grpc_address, tmp_path, **settings).start(triton_up=False)
    nothing = {STUB: 0.0, "unknown": 0.0}
    assert demand(gateway) == nothing

    refused = [call(gateway, {"text": ["one", "two", "three"]}), call(gateway, {"text": "one", "model": "made up"})]
    assert demand(gateway) == {STUB: 3.0, "unknown": 1.0}
    for response in refused:
        assert response.status_code == 503
        assert response.json()["code"] == "dependency_down"
        assert int(response.headers["retry-after"]) >= 1
    wait_until(lambda: demand(gateway) == nothing, "demand is forgotten after its window")
    assert sorted(phases(gateway)) == ["imports", "open", "tokenizers"]

    triton.start()
    wait_until(lambda: call(gateway, {"text": "one"}).status_code == 200, "served without a restart")
    wait_until(lambda: demand(gateway) == nothing, "demand is 0 again")
    assert call(gateway, {"text": "one", "model": "made up"}).status_code == 404
    assert demand(gateway) == nothing
    assert phases(gateway)[-2:] == ["triton", "models"]
