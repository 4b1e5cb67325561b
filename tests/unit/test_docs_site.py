"""The site is built from the documents without a warning, links and anchors lead somewhere, and it loads nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
LOOPBACK = {"127.0.0.1", "localhost"}


def build(docs: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run Sphinx with the options of `make docs`."""
    options = re.search(r"^SPHINX := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert options is not None
    words = options[1].replace("build/doctrees", str(folder / "doctrees")).split()
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *words, "-b", "html", str(docs), str(folder / "site")],
        capture_output=True, text=True, timeout=90, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "docs", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "site"


def test_every_document_is_a_page_that_the_index_leads_to(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    index = (site / "index.html").read_text(encoding="utf-8")
    assert {name for name in pages if not (site / f"{name}.html").is_file()} == set()
    assert {name for name in pages - {"index"} if f'href="{name}.html"' not in index} == set()


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=\"([^\"]+)\"", text)
        assert [url for url in loaded if re.match(r"(?:https?:)?//", url)] == [], page.name
    for sheet in site.rglob("*.css"):
        loaded = re.findall(r"(?:@import\s+|url\()[\"']?([^\"')\s;]+)", sheet.read_text(encoding="utf-8"))
        assert [url for url in loaded if re.match(r"(?:https?:)?//", url)] == [], sheet.name


def test_every_anchor_of_the_site_is_there(site: Path) -> None:
    ids = {
        page.name: set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8"))) for page in site.glob("*.html")
    }
    for page in site.glob("*.html"):
        for url in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', page.read_text(encoding="utf-8")):
            path, _, anchor = url.partition("#")
            if anchor and not urlsplit(url).scheme:
                assert anchor in ids[path or page.name], f"{page.name}: {url}"


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs/conf.py", docs)
    text = "# Index\n\n[x](doors.md#no-such-heading)\n\n[x](no-such-page.md)\n\n```{toctree}\ndoors\n```\n"
    (docs / "index.md").write_text(text, encoding="utf-8")
    (docs / "doors.md").write_text("# Doors\n\nText.\n", encoding="utf-8")
    done = build(docs, tmp_path)
    assert done.returncode != 0
    assert "index.md:3" in done.stderr
    assert "index.md:5" in done.stderr


def test_outer_links_have_the_form_of_one() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for url in re.findall(r"\]\(([a-z]+:[^)\s]*)\)|<(https?:[^>\s]+)>", text):
            parts = urlsplit(next(filter(None, url)))
            assert parts.scheme in {"https", "mailto"} or parts.hostname in LOOPBACK, f"{page.name}: {url}"
            assert parts.scheme == "mailto" or "." in (parts.hostname or ""), f"{page.name}: {url}"


def test_the_quick_start_shows_what_the_readme_shows() -> None:
    blocks = [re.findall(r"^```(?:sh|python)\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
              for name in ("README.md", "docs/quick-start.md")]  # fmt: skip
    shown = "".join(blocks[1])
    use = next(block for block in blocks[0] if "/predict?text=" in block)
    python = next(block for block in blocks[0] if "from twodoor import" in block)
    assert use in shown
    assert python in shown
    assert [line for line in "".join(blocks[0][:1]).splitlines() if line not in shown] == []
