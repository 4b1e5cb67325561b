"""A wrong setting ends the gateway with exit code 2 and one line that names it."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from gateway.__main__ import main


@pytest.fixture(autouse=True)
def _logging_is_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TWODOOR_GATEWAY_PORT", "eighty"),
        ("TWODOOR_GATEWAY_MAX_ROWS", "0"),
        ("TWODOOR_GATEWAY_HOST", "0.0.0.0"),
        ("TWODOOR_GATEWAY_KEYS_FILE", "nowhere.jsonl"),
        ("TWODOOR_GATEWAY_LIMITS_STORAGE_URL", "nonsense://host"),
        ("TWODOOR_JOBS_DATABASE_URL", "postgresql://nowhere"),
        ("TWODOOR_TRITON_POLL_INTERVAL_S", "-1"),
        ("TWODOOR_LOG_LEVEL", "loud"),
        ("TWODOOR_LOG_TRACE_EXPORTER", "nowhere"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gateway: ")
    assert name in line
