"""Short questions over HTTP on loopback, each with a deadline and never through a proxy."""

from typing import Any

import httpx

ASK_TIMEOUT_S = 5.0


def client() -> httpx.AsyncClient:
    """Return a client that ignores proxy variables."""
    return httpx.AsyncClient(timeout=ASK_TIMEOUT_S, trust_env=False)


async def status_of(http: httpx.AsyncClient, url: str) -> int | None:
    """Return the status of a GET; None if nothing answers."""
    try:
        return (await http.get(url)).status_code
    except httpx.HTTPError:
        return None


async def parts_down(http: httpx.AsyncClient, url: str) -> set[str]:
    """Return the parts a door's ``/readyz`` calls down; the door itself, as ``door``, where it gives no such answer."""
    try:
        dependencies = (await http.get(url)).json()["dependencies"]
        return {str(name) for name, state in dependencies.items() if state != "up"}
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return {"door"}


async def post_json(http: httpx.AsyncClient, url: str, body: object, timeout_s: float) -> tuple[int, Any]:
    """POST JSON and return (status, decoded answer or None); raises httpx.HTTPError if no JSON comes in time."""
    answer = await http.post(url, json=body, timeout=timeout_s)
    try:
        return answer.status_code, answer.json() if answer.content else None
    except ValueError as exc:
        raise httpx.DecodingError("the answer is no JSON", request=answer.request) from exc
