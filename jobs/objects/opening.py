"""From settings to an object store: a local folder, S3 and what speaks like it, Google Cloud Storage, Azure."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from jobs.objects.local import LocalObjects
from jobs.objects.store import Objects
from serving.errors import ConfigError
from serving.settings import JobsSettings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_CLOUDS = ("s3", "gs", "az")
_CONNECT_TIMEOUT_S = 5.0
_RETRIES = 3
"""Retries of one request inside obstore, for a hiccup. A store that is away longer is for the caller to wait for."""


def open_objects(settings: JobsSettings) -> Objects:
    """Return the store of ``TWODOOR_JOBS_OBJECTS_URL``, without asking it anything; raises ConfigError."""
    scheme = urlsplit(settings.objects_url).scheme
    try:
        if scheme == "file":
            return LocalObjects(_folder(settings.objects_url), settings.objects_timeout_s)
        if scheme in _CLOUDS:
            return Objects(_cloud(settings, scheme), settings.objects_timeout_s)
    except (BaseError, OSError, ValueError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigError(f"TWODOOR_JOBS_OBJECTS_URL={settings.objects_url}: {reason}") from exc
    raise ConfigError(
        f"TWODOOR_JOBS_OBJECTS_URL={settings.objects_url}: expected file:///folder, s3://bucket/prefix, gs://… or az://…"
    )


def memory_objects(timeout_s: float = 5.0) -> Objects:
    """Return a store in this process's memory, for tests."""
    return Objects(MemoryStore(), timeout_s)


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    folder = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or not folder.is_absolute() or folder == Path("/"):
        raise ValueError("expected the absolute path of a folder, file:///folder")
    return folder


def _cloud(settings: JobsSettings, scheme: str) -> Any:
    seconds = settings.objects_timeout_s
    client: ClientConfig = {
        "timeout": timedelta(seconds=seconds),
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT_S, seconds)),
        "allow_http": settings.objects_allow_http,
    }
    retry: RetryConfig = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
    }
    if scheme != "s3":
        return from_url(settings.objects_url, client_options=client, retry_config=retry)
    config: dict[str, Any] = {"region": settings.objects_region}
    if settings.objects_endpoint:
        config["endpoint"] = settings.objects_endpoint
    return from_url(settings.objects_url, config=config, client_options=client, retry_config=retry)  # type: ignore[call-overload]
