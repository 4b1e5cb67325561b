"""A gateway with jobs in the test's own loop, with its real server, and somebody who does the rows' work without a model."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from uvicorn import Server

from gateway.app import build
from gateway.job_door import Stores
from gateway.keys import Keys
from gateway.server import bind, server_config
from jobs.ledger import Ledger, part_key
from jobs.memory import MemoryLedger
from jobs.objects import Objects, memory_objects
from jobs.records import Claim, Done
from serving.codec import encode_json
from serving.settings import GatewaySettings, JobsSettings, ModelSettings, TritonSettings
from tests.parts import Triton, free_ports

MODEL = "sentiment_model"
ACME, OTHER, ADMIN = "sk-acme", "sk-other", "sk-admin"


@dataclass
class Door:
    """A running gateway: a client of it, its port, its stores."""

    client: httpx.AsyncClient
    port: int
    ledger: Ledger
    objects: Objects

    async def submit(self, *inputs: Any, **more: Any) -> dict[str, Any]:
        """Submit a JSON job and return it."""
        headers = more.pop("headers", {})
        body = {"model": MODEL, "inputs": list(inputs) or ["good", "bad"], **more}
        response = await self.client.post("/v1/jobs", json=body, headers=headers)
        assert response.status_code == 202, response.text
        return dict(response.json())

    async def lines(self, body: Any, query: str = f"model={MODEL}", **headers: str) -> httpx.Response:
        """Submit a JSONL job."""
        kinds = {
            "content-type": "application/jsonl",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        return await self.client.post(f"/v1/jobs?{query}", content=body, headers=kinds)

    async def job(self, job_id: str) -> dict[str, Any]:
        """Return a job."""
        response = await self.client.get(f"/v1/jobs/{job_id}")
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def work(self, chunks: int = 1000, failing: Collection[int] = ()) -> None:
        """Do up to so many chunks as a consumer does, one line a row; then close what is due."""
        for _ in range(chunks):
            claim = await self.ledger.claim("test", {MODEL: ("1",)}, (), 30)
            if claim is None:
                break
            await self._do(claim, failing)
        await self.ledger.close_due(100)

    async def _do(self, claim: Claim, failing: Collection[int]) -> None:
        rows = range(claim.plan.first_row, claim.plan.first_row + claim.plan.row_count)
        cancelled = not claim.status.runs
        failed = [row for row in rows if row in failing or cancelled]
        lines = [_line(row, row in failed) for row in rows]
        errors = [_line(row, True) for row in failed]
        result, error = b"".join(lines), b"".join(errors)
        await self.objects.put(part_key(claim), result + error)
        done = Done(part_key(claim), len(lines) - len(errors), len(errors), len(result), len(error))
        assert await self.ledger.complete(claim, done)


def _line(row: int, failed: bool) -> bytes:
    what = {"error": {"code": "empty_text", "message": "é"}} if failed else {"output": {"label": "positive"}}
    return encode_json({"index": row, **what}) + b"\n"


def memory_stores() -> Stores:
    """New stores in memory."""
    return Stores(MemoryLedger(), memory_objects())


def keys_file(folder: Path, **fields: Any) -> Keys:
    """Keys ``ACME`` (with these fields), ``OTHER`` and ``ADMIN``."""
    lines = [
        {"sha256": _sum(ACME), "tenant": "acme", **fields},
        {"sha256": _sum(OTHER), "tenant": "other"},
        {"sha256": _sum(ADMIN), "tenant": "ops", "admin": True},
    ]
    file = folder / "keys.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return Keys(file)


def bearer(key: str) -> dict[str, str]:
    """Return the header that carries a key."""
    return {"authorization": f"Bearer {key}"}


def _sum(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@asynccontextmanager
async def job_door(
    stores: Stores | None = None,
    *,
    keys: Keys | None = None,
    triton: Triton | None = None,
    jobs: dict[str, Any] | None = None,
    without_jobs: bool = False,
    real: JobsSettings | None = None,
    told: list[BaseException] | None = None,
    **changes: Any,
) -> AsyncIterator[Door]:
    """A gateway in this loop; without ``triton`` the model server is away.

    ``real`` lets it open its stores itself; ``told`` takes what would end the process.
    """
    opened = stores or memory_stores()
    gateway = GatewaySettings(port=free_ports(1)[0], **changes)
    address: dict[str, Any] = {"grpc_address": triton.grpc_address if triton else "127.0.0.1:1", "poll_interval_s": 0.2}
    models: dict[str, Any] = {"repository": triton.repository} if triton else {}
    failures: list[BaseException] = [] if told is None else told
    app = build(
        gateway, ModelSettings(**models), TritonSettings(**address), failures.append, keys=keys,
        jobs=real or JobsSettings(**(jobs or {})), stores=None if without_jobs or real else opened,
    )  # fmt: skip
    server = Server(server_config(app, gateway))
    serving = asyncio.create_task(server.serve([bind(gateway)]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=30) as client:
            await until(lambda: _ready(client, triton is not None), "the gateway is ready")
            yield Door(client, gateway.port, opened.ledger, opened.objects)
    finally:
        server.should_exit = True
        await serving
    assert told is not None or not failures


async def until(condition: Any, what: str, timeout_s: float = 20.0) -> None:
    """Poll an async condition with a deadline."""
    end_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < end_s, f"{what}: not within {timeout_s:g} s"
        await asyncio.sleep(0.02)


async def _ready(client: httpx.AsyncClient, with_triton: bool) -> bool:
    try:
        dependencies = (await client.get("/readyz")).json()["dependencies"]
    except httpx.TransportError:
        return False
    return dependencies["triton"] == "up" or not with_triton


def rows_of(content: bytes) -> Sequence[dict[str, Any]]:
    """Return the lines of a result."""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check that a response is a problem of this kind and return its members."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    members: dict[str, Any] = response.json()
    assert members["code"] == code
    return members
