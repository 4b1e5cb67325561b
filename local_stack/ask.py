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


async def post_json(http: httpx.AsyncClient, url: str, body: object, timeout_s: float) -> tuple[int, Any]:
    """POST JSON and return (status, decoded answer or None); raises httpx.HTTPError if nothing answers in time."""
    answer = await http.post(url, json=body, timeout=timeout_s)
    return answer.status_code, answer.json() if answer.content else None
