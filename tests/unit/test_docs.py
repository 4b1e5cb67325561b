"""The documents: links lead somewhere, names they use exist, and the settings page is what the classes say."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field, SecretStr

from gateway import jobs_routes, openapi_doc
from gateway.stream_socket import PATH as STREAM_PATH
from jobs.states import SHOWN
from serving import settings, settings_doc
from serving.errors import ConfigError, TwodoorError
from serving.settings import KafkaSettings, Settings
from twodoor.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
WANTED = (
    "index", "quick-start", "own-model", "doors", "api", "settings", "deploy", "operations", "architecture", "kafka-traps",
)  # fmt: skip


def plain(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", plain(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", plain(page)):
        if not re.match(r"[a-z]+:", target):
            yield target


def subclasses(cls: type[TwodoorError]) -> Iterator[type[TwodoorError]]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_document_is_there() -> None:
    assert {f"{name}.md" for name in WANTED} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_internal_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_document_names_only_settings_that_exist(page: Path) -> None:
    known = {name for cls in settings.ALL_SETTINGS for name in settings.env_names(cls).values()}
    known |= set(settings.OTHER_VARIABLES)
    named = set(re.findall(r"TWODOOR_[A-Z0-9_]*[A-Z0-9]", page.read_text(encoding="utf-8")))
    prefixes = {name for name in named if any(other.startswith(f"{name}_") for other in known)}
    assert named - prefixes <= known


@cache
def source(*folders: str) -> str:
    """Return the text of the product's modules and migrations."""
    files = (
        file for folder in folders for file in sorted((ROOT / folder).rglob("*")) if file.suffix in (".py", ".sql")
    )
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("name", ["doors", "api"])
def test_the_pages_for_callers_have_every_code_of_the_error_tree_and_of_the_gateway(name: str) -> None:
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    codes = {cls.code for cls in subclasses(TwodoorError)} - {ConfigError.code}
    codes |= set(re.findall(r'(?:Problem|_refuse)\(\s*\d{3}, "(\w+)"', source("gateway")))
    assert "range_not_satisfiable" in codes
    assert {code for code in codes if f"`{code}`" not in page} == set()


@pytest.mark.parametrize("name", ["doors", "api"])
def test_the_pages_for_callers_have_every_state_and_topic(name: str) -> None:
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    topics = [field.default for name, field in KafkaSettings.model_fields.items() if name.endswith("_topic")]
    assert len(topics) == 6
    assert [name for name in (*SHOWN, *topics) if f"`{name}`" not in page] == []


def test_every_route_of_jobs_is_in_a_document() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES).replace("{id}", "{job_id}")
    assert [
        route.path for route in jobs_routes.ROUTES if not re.search(rf"{re.escape(route.path)}(?![\w/])", pages)
    ] == []


def test_the_api_page_says_what_the_routes_say_of_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs/api.md"
    assert openapi_doc.main(["--check", "--file", str(page)]) == 0, capsys.readouterr().err
    stale = tmp_path / "api.md"
    stale.write_text(page.read_text(encoding="utf-8").replace("| 504 |", "| 599 |", 1), encoding="utf-8")
    assert openapi_doc.main(["--check", "--file", str(stale)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert openapi_doc.main(["--file", str(stale)]) == 0
    assert stale.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_the_api_page_has_a_section_for_every_route() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    wanted = {
        f"{method} {route.path}" for route in jobs_routes.ROUTES for method in (route.methods or ()) if method != "HEAD"
    }
    wanted |= {"POST /predict", "GET /healthz", "GET /readyz", "GET /metrics"}
    assert set(re.findall(r"^### `([A-Z]+ /\S*)`$", page, re.MULTILINE)) == wanted
    assert f"## `WS {STREAM_PATH}`" in page


def test_the_api_page_has_every_reason_to_close_a_stream() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    told = set(re.findall(r"\bClose\(\s*(1\d{3})", source("gateway")))
    assert told
    assert {code for code in told if f"\n| {code} |" not in page} == set()


def test_the_operations_page_has_exactly_the_metrics_there_are() -> None:
    made = set(re.findall(r'"(twodoor_[a-z_]+)"', source("gateway", "batch_consumer", "serving")))
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert set(re.findall(r"twodoor_[a-z_]+", page)) == made


def test_the_operations_page_has_exactly_the_duties_that_the_ledger_counts() -> None:
    view = source("jobs/migrations").partition("CREATE VIEW twodoor.duties")[2].partition(";")[0]
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("\n## Duties")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == re.findall(r"SELECT '(\w+)',", view)


def test_what_the_operations_page_quotes_from_logs_is_logged() -> None:
    page = re.sub(r"`[^`\n]*`", "", plain(ROOT / "docs/operations.md"))
    quoted = set(re.findall(r'"(\w[\w ]*[ _]\w[\w ]*)"', page))
    assert {"duties wait", "ledger_away"} <= quoted
    code = source("gateway", "batch_consumer", "serving", "jobs")
    assert {words for words in quoted if f'"{words}"' not in code} == set()


def test_the_architecture_page_has_a_row_for_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    packages = tools["importlinter"]["root_packages"]
    assert [name for name in packages if f"\n| `{name}/` |" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_document_shows_only_commands_and_targets_that_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert {name for name in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE) if name not in targets} == set()
    for line in shown_commands(text):
        command: Any = typer.main.get_command(app)
        options: set[str] = set()
        for word in shlex.split(line, comments=True)[1:]:
            if hasattr(command, "commands"):
                if "|" in word:  # `a|b`: several in one
                    break
                assert word in command.commands, f"{page.name}: {line}"
                command = command.commands[word]
                options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
            elif word.startswith("-") and word != "-":
                assert word.partition("=")[0] in {*options, "--help"}, f"{page.name}: {line}"


def shown_commands(text: str) -> Iterator[str]:
    """Yield every `twodoor` command of a page, in blocks and in sentences."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    yield from re.findall(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?(twodoor .*)$", blocks, re.MULTILINE)
    yield from re.findall(r"`(twodoor [a-z][^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_document_names_only_files_of_the_repository_that_exist(page: Path) -> None:
    named = re.findall(r"`([a-z_]+/[\w./-]+\.(?:py|sh|yaml|md|toml|proto|sql))`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_trap_table_has_a_row_for_each_of_the_seventeen() -> None:
    page = (ROOT / "docs/kafka-traps.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [str(number) for number in range(1, 18)]


def test_every_test_the_trap_table_names_exists() -> None:
    page = (ROOT / "docs/kafka-traps.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    written = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named <= written


def test_the_settings_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings_doc.main(["--check", "--file", str(ROOT / "docs/settings.md")]) == 0, capsys.readouterr().err


def test_a_stale_settings_page_is_told_in_one_line_and_writing_mends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "settings.md"
    page.write_text(settings_doc.render().replace("`8080`", "`80`"), encoding="utf-8")
    assert settings_doc.main(["--check", "--file", str(page)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert settings_doc.main(["--file", str(page)]) == 0
    assert settings_doc.main(["--check", "--file", str(page)]) == 0


def test_every_variable_has_a_row_with_a_meaning() -> None:
    page = settings_doc.render()
    names = [name for cls in settings.ALL_SETTINGS for name in settings.env_names(cls).values()]
    for name in [*names, *settings.OTHER_VARIABLES]:
        rows = re.findall(rf"^\| `{name}` \| (?:.* \| )?(.+) \|$", page, re.MULTILINE)
        assert rows, name
        assert all(row.strip() for row in rows), name


def test_defaults_and_bounds_are_shown_as_a_person_would_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class OddSettings(Settings):
        """Odd | ones."""

        folder: Path = Field(Path("a/b"), description="A folder.")
        nothing: Path | None = Field(None, description="Optional.")
        level: Annotated[int, Field(gt=0, lt=10)] = Field(3, description="Level.")
        share: float = Field(0.5, ge=0, le=1, description="Share.")
        kind: Literal["x", "y"] = Field("x", description="Kind.")
        needed: str = Field(min_length=1, description="Needed.")
        names: tuple[str, ...] = Field(("p", "q"), description="Names.")
        password: SecretStr = Field(SecretStr("hidden"), description="Secret.")

    monkeypatch.setattr(settings_doc, "ALL_SETTINGS", (OddSettings,))
    page = settings_doc.render()
    assert "Odd \\| ones." in page
    assert "| `FOLDER` | `a/b` | path | A folder. |" in page
    assert "| `NOTHING` | not set | path | Optional. |" in page
    assert "| `LEVEL` | `3` | whole number, over 0, under 10 | Level. |" in page
    assert "| `SHARE` | `0.5` | number, at least 0, at most 1 | Share. |" in page
    assert "| `KIND` | `x` | `x` or `y` | Kind. |" in page
    assert "| `NEEDED` | must be set | text, not empty | Needed. |" in page
    assert "| `PASSWORD` | not set | text | Secret. |" in page
    assert "| `NAMES` | `p,q` | comma-separated list | Names. |" in page
