"""Who calls: API keys from a file that is read again on SIGHUP, and the check that stands before every body.

The file holds SHA-256 sums, never keys. Without a file the door is open: one tenant, on loopback only.
"""

import hashlib
import hmac
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.envelope import request_id_of
from gateway.problems import Problem, render
from serving.errors import ConfigError

log = structlog.get_logger(__name__)

PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"})
_CALLER = "twodoor.caller"
_ASK_AGAIN = "twodoor.ask_again"
_SUM = re.compile(r"[0-9a-fA-F]{64}")
# A tenant is also a folder of imported objects.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS = ("sha256", "tenant", "weight", "rate_rows_per_s", "max_queued_rows", "admin")
_EMPTY_KEY = hashlib.sha256(b"").digest()
_LEAST_RATE = 0.001
_MOST_QUEUED_ROWS = 2**53


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, and what its key allows; None = no limit."""

    tenant: str
    weight: float = 1.0
    rate_rows_per_s: float | None = None
    max_queued_rows: int | None = None
    admin: bool = False


OPEN = Caller("default", admin=True)
"""The caller of a door without keys."""


class Keys:
    """The keys of the file; with ``path`` None everybody is ``OPEN``. Raises ConfigError that names line and field."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._callers = None if path is None else read_keys(path)
        self.is_stale = False
        """Whether the last reload failed, so that the keys in use are older than their file."""

    def reload(self) -> None:
        """Read the file again; one that is wrong is told, and the keys stay as they were."""
        if self.path is None:
            return
        try:
            self._callers = read_keys(self.path)
        except ConfigError as exc:
            self.is_stale = True
            log.error("keys not read again: the old ones stay", reason=str(exc))
        else:
            self.is_stale = False
            log.info("keys read", keys=len(self._callers))

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller | None:
        """Return whose key a request's headers hold, or None."""
        if self._callers is None:
            return OPEN
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1:
            return None
        scheme, _, rest = values[0].strip(b" \t").partition(b" ")
        key = rest.lstrip(b" ")
        if scheme.lower() != b"bearer" or not key:
            return None
        digest = hashlib.sha256(key).digest()
        # What a caller could learn from the look-up's time is of a sum it cannot choose; the comparison tells nothing.
        known, caller = self._callers.get(digest, (b"", None))
        return caller if hmac.compare_digest(known, digest) else None


class Gate:
    """The middleware: a request without a right key is answered before a byte of its body is read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection: a request, or a WebSocket, which without a right key is never opened."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in PUBLIC_PATHS:
            caller = self._keys.caller(scope["headers"])
            if caller is None:
                await render(_unauthorized(), request_id_of(scope))(scope, receive, send)
                return
            scope[_CALLER] = caller
            if scope["type"] == "websocket":
                scope[_ASK_AGAIN] = partial(self._keys.caller, scope["headers"])
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Return whose request it is."""
    return caller_in(request.scope)


def caller_in(scope: Scope) -> Caller:
    """Return whose the request of this scope is."""
    return cast("Caller", scope[_CALLER])


def caller_now(scope: Scope) -> Caller | None:
    """Return whose a long connection is by the keys of this moment; None where its key is no longer one."""
    return cast("Callable[[], Caller | None]", scope[_ASK_AGAIN])()


def require_admin(request: Request) -> None:
    """Raise Problem 403 unless the caller's key is an admin's."""
    if not caller_of(request).admin:
        raise Problem(403, "forbidden", "this route needs an admin key")


def read_keys(path: Path) -> dict[bytes, tuple[bytes, Caller]]:
    """Return SHA-256 sum → the same sum and its caller; raises ConfigError that names the line and the field."""
    setting = f"TWODOOR_GATEWAY_KEYS_FILE={path}"
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as exc:
        raise ConfigError(f"{setting} cannot be read: {exc.strerror}") from exc
    found: dict[bytes, tuple[bytes, Caller]] = {}
    first_of: dict[str, tuple[int, Caller]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            digest, caller = _entry(line)
            if digest in found:
                raise _Wrong("sha256", "stands on an earlier line too")
            _check_same_tenant(caller, *first_of.setdefault(caller.tenant, (number, caller)))
        except _Wrong as exc:
            raise ConfigError(f"{setting} line {number}: {exc}") from None
        found[digest] = (digest, caller)
    if not found:
        raise ConfigError(f"{setting} holds no key; without keys leave the setting empty")
    return found


class _Wrong(Exception):
    """What is wrong with a field of a line."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")


def _entry(line: bytes) -> tuple[bytes, Caller]:
    """Return the sum and the caller of one line."""
    entry = _object(line)
    for name in entry:
        if name not in _FIELDS:
            raise _Wrong(repr(name[:32]), f"is no field; the fields are {', '.join(_FIELDS)}")
    digest_text, tenant = entry.get("sha256"), entry.get("tenant")
    if not isinstance(digest_text, str) or not _SUM.fullmatch(digest_text):
        raise _Wrong("sha256", "has to be the SHA-256 of the key as 64 hexadecimal digits")
    digest = bytes.fromhex(digest_text)
    if digest == _EMPTY_KEY:
        raise _Wrong("sha256", "is that of an empty key")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise _Wrong("tenant", "has to be 1 to 64 letters, digits, '.', '_' or '-', with a letter or digit first")
    weight = _number(entry, "weight")
    admin = entry.get("admin", False)
    if not isinstance(admin, bool):
        raise _Wrong("admin", "has to be true or false")
    rate = _number(entry, "rate_rows_per_s")
    return digest, Caller(tenant, 1.0 if weight is None else weight, rate, _queued_rows(entry), admin)


def _object(line: bytes) -> Mapping[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for place, (name, _) in enumerate(pairs):
            if name in (other for other, _ in pairs[:place]):
                raise _Wrong(repr(name[:32]), "is given twice")
        return dict(pairs)

    try:
        entry = json.loads(line.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise _Wrong("the line", "is not JSON in UTF-8") from None
    if not isinstance(entry, dict):
        raise _Wrong("the line", "has to be a JSON object")
    return entry


def _number(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Wrong(name, "has to be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < _LEAST_RATE:
        raise _Wrong(name, f"has to be at least {_LEAST_RATE:g} and finite")
    return number


def _queued_rows(entry: Mapping[str, Any]) -> int | None:
    value = entry.get("max_queued_rows")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_QUEUED_ROWS:
        raise _Wrong("max_queued_rows", "has to be a whole number, at least 1")
    return value


def _check_same_tenant(caller: Caller, line: int, first: Caller) -> None:
    """A tenant's share is one: keys of one tenant may differ in nothing but ``admin``."""
    for name in ("weight", "rate_rows_per_s", "max_queued_rows"):
        if getattr(caller, name) != getattr(first, name):
            raise _Wrong(name, f"differs from that of the same tenant on line {line}")


def _unauthorized() -> Problem:
    return Problem(
        401,
        "unauthorized",
        "send a known key as Authorization: Bearer KEY",
        field="header Authorization",
        headers={"WWW-Authenticate": "Bearer"},
    )
