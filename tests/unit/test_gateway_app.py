"""The two ways through the application answer, name and count a bug of ours alike."""

from typing import Any

import pytest

from gateway.app import build
from serving.settings import GatewaySettings, ModelSettings, TritonSettings

WAYS = [("POST", "/predict"), ("GET", "/readyz")]


@pytest.mark.parametrize(("method", "path"), WAYS)
async def test_a_bug_is_a_500_with_its_request_id_and_is_counted_as_one(method: str, path: str) -> None:
    app = build(GatewaySettings(), ModelSettings(), TritonSettings(), on_fatal=lambda _: None)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path, "raw_path": path.encode(),
        "root_path": "", "query_string": b"", "headers": [(b"x-request-id", b"mine")], "client": None, "server": None,
        "state": {},  # no door in it
    }  # fmt: skip
    with pytest.raises((KeyError, AttributeError)):  # the server logs it
        await app(scope, receive, send)
    assert sent[0]["status"] == 500
    assert [value for name, value in sent[0]["headers"] if name == b"x-request-id"] == [b"mine"]
    assert f'duration_seconds_count{{code="500",route="{path}"}} 1.0' in app.state.metrics.render().decode()
