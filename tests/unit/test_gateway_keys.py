"""The keys file is checked strictly, and what is wrong is named by line and field; odd credentials are no key."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.keys import OPEN, Caller, Keys
from serving.errors import ConfigError

KEY = b"sk-test-0123456789"


def line(key: bytes = KEY, **fields: Any) -> str:
    return json.dumps({"sha256": hashlib.sha256(key).hexdigest(), "tenant": "acme", **fields})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def headers(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), *((b"authorization", value) for value in values)]


def test_all_fields_are_read_and_the_rest_has_defaults(file: Path) -> None:
    lines = [
        "\ufeff" + line(weight=3, rate_rows_per_s=0.5, max_queued_rows=1000, admin=True),
        "",
        line(b"second", tenant="b.2_x-y", sha256=hashlib.sha256(b"second").hexdigest().upper()),
        "  ",
    ]
    file.write_text("\r\n".join(lines))
    keys = Keys(file)
    assert keys.caller(headers(b"Bearer " + KEY)) == Caller("acme", 3.0, 0.5, 1000, True)
    assert keys.caller(headers(b"Bearer second")) == Caller("b.2_x-y", 1.0, None, None, False)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "holds no key"),
        ("\n \n", "holds no key"),
        (line() + "\n" + line(), "line 2: sha256"),
        (line(b""), "line 1: sha256"),
        (line(sha256="zz" * 32), "line 1: sha256"),
        (line(sha256="ab" * 31), "line 1: sha256"),
        (line(sha256=5), "line 1: sha256"),
        ('{"tenant": "acme"}', "line 1: sha256"),
        (line(tenant=""), "line 1: tenant"),
        (line(tenant="../x"), "line 1: tenant"),
        (line(tenant=None), "line 1: tenant"),
        (line(tenant="a" * 65), "line 1: tenant"),
        (line(weight=0), "line 1: weight"),
        (line(weight=-1), "line 1: weight"),
        (line(weight=True), "line 1: weight"),
        (line(weight="1"), "line 1: weight"),
        (line(weight=10**400), "line 1: weight"),
        (line().replace("}", ', "weight": NaN}'), "line 1: weight"),
        (line(rate_rows_per_s=0), "line 1: rate_rows_per_s"),
        (line(rate_rows_per_s="fast"), "line 1: rate_rows_per_s"),
        (line(max_queued_rows=0), "line 1: max_queued_rows"),
        (line(max_queued_rows=1.5), "line 1: max_queued_rows"),
        (line(max_queued_rows=True), "line 1: max_queued_rows"),
        (line(admin="yes"), "line 1: admin"),
        (line(colour="red"), "line 1: 'colour'"),
        (line().replace("}", ', "tenant": "b"}'), "line 1: 'tenant'"),
        (line(b"a") + "\n" + line(b"b", weight=2), "line 2: weight"),
        ("sk-test-in-the-clear", "line 1: the line"),
        ("[1]", "line 1: the line"),
        ("[" * 100_000, "line 1: the line"),
    ],
)
def test_a_wrong_file_is_refused_and_the_place_is_named(file: Path, content: str, named: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        Keys(file)
    assert named in str(refused.value)
    assert "TWODOOR_GATEWAY_KEYS_FILE" in str(refused.value)
    assert "in-the-clear" not in str(refused.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="line 1: the line"):
        Keys(file)


def test_reading_again_takes_new_keys_and_keeps_the_old_ones_where_the_file_is_broken(file: Path) -> None:
    file.write_text(line())
    keys = Keys(file)
    for broken in ("", "not json", line(weight=-1)):
        file.write_text(broken)
        with capture_logs() as logs:
            keys.reload()
        assert [entry["log_level"] for entry in logs] == ["error"]
        assert keys.caller(headers(b"Bearer " + KEY)) is not None
        assert keys.is_stale
    file.write_text(line(b"new"))
    keys.reload()
    assert not keys.is_stale
    assert keys.caller(headers(b"Bearer " + KEY)) is None
    assert keys.caller(headers(b"Bearer new")) == Caller("acme")


def test_the_scheme_has_no_case_and_may_be_followed_by_several_spaces(file: Path) -> None:
    file.write_text(line())
    keys = Keys(file)
    for value in (b"Bearer " + KEY, b"bearer " + KEY, b"BEARER  " + KEY, b" Bearer   " + KEY + b" "):
        assert keys.caller(headers(value)) is not None


@pytest.mark.parametrize(
    "values",
    [
        (),
        (b"",),
        (b"Bearer",),
        (b"Bearer ",),
        (b"Bearer caf\xe9",),
        ("Bearer “" + KEY.decode() + "”").encode().split(b"\n"),
        (b'Bearer "' + KEY + b'"',),
        (b"Basic eDp5",),
        (KEY,),
        (b"Bearer" + KEY,),
        (b"Bearer " + b"a" * 65_536,),
        (b"Bearer " + KEY + b"x",),
        (b"Bearer " + KEY, b"Bearer " + KEY),
    ],
)
def test_anything_else_is_no_key(file: Path, values: tuple[bytes, ...]) -> None:
    file.write_text(line() + "\n" + line("clé".encode(), tenant="autre"))
    assert Keys(file).caller(headers(*values)) is None


def test_without_a_file_everybody_is_the_one_tenant_and_may_steer() -> None:
    assert Keys().caller(headers()) is OPEN
    assert OPEN.tenant == "default"
    assert OPEN.admin
