"""The documents: links lead somewhere, names they use exist, and the settings page is what the classes say."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from serving import settings, settings_doc
from serving.errors import RowError, ServerError, TwodoorError
from serving.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
WANTED = ("architecture", "doors", "own-model", "operations", "deploy", "kafka-traps", "settings")


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


def test_the_doors_page_explains_every_code_of_the_error_tree() -> None:
    page = (ROOT / "docs/doors.md").read_text(encoding="utf-8")
    codes = {cls.code for base in (RowError, ServerError) for cls in subclasses(base)}
    assert {code for code in codes if f"`{code}`" not in page} == set()


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

    monkeypatch.setattr(settings_doc, "ALL_SETTINGS", (OddSettings,))
    page = settings_doc.render()
    assert "Odd \\| ones." in page
    assert "| `FOLDER` | `a/b` | path | A folder. |" in page
    assert "| `NOTHING` | not set | path | Optional. |" in page
    assert "| `LEVEL` | `3` | whole number, over 0, under 10 | Level. |" in page
    assert "| `SHARE` | `0.5` | number, at least 0, at most 1 | Share. |" in page
    assert "| `KIND` | `x` | `x` or `y` | Kind. |" in page
    assert "| `NEEDED` | must be set | text, not empty | Needed. |" in page
    assert "| `NAMES` | `p,q` | comma-separated list | Names. |" in page
