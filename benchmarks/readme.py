"""`python -m benchmarks.readme`: write the README's table again from the published results, or publish new ones.

`--publish` takes the figures of the newest report (and of the peers, where they were measured) into benchmarks/published:
only those of sections that were measured; others keep what they had.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import peer_figures
from benchmarks.plan import SECTIONS
from benchmarks.report import JSON_NAME, OTHERS_NOTE_SHARE, write_whole
from benchmarks.stats import number

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = Path(__file__).parent / "results"
PUBLISHED = Path(__file__).parent / "published"
BEGIN = "<!-- benchmarks:begin -->"
END = "<!-- benchmarks:end -->"
NOT_YET = "Not measured yet: `make bench`, then `.venv/bin/python -m benchmarks.readme --publish`."
FEW = 3
"""How many figures of a section stand in the table where none has a bar and none is a ratio."""
DIGITS = 4
_KEPT = ("started_at", "seconds", "machine", "load_before", "stack", "texts", "accuracy")
_FIGURE = ("name", "unit", "median", "low", "high", "runs", "bar", "verdict", "headline")
# A path of the machine that measured; its last part says what it was.
_PATH = re.compile(r"(?<![\w./:])(?:\.\.)?/(?:[\w.+-]+/)+")

Json = dict[str, Any]


def main() -> int:
    """Render, publish or check; returns 1 where README differs or the results may not be published."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--publish", action="store_true", help="take over the newest results first")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where README.md differs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="folder of the report to publish")
    options = parser.parse_args()
    try:
        if options.publish:
            publish(options.results, PUBLISHED)
        return refresh(README, PUBLISHED, check=options.check)
    except ValueError as exc:
        print(f"benchmarks.readme: {exc}", file=sys.stderr)
        return 1


def refresh(readme: Path, published: Path, *, check: bool) -> int:
    """Put the table between README's marks; with ``check`` only say whether it stands there. Raises ValueError."""
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{readme.name} needs each of these lines once: {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    whole = f"{before}{BEGIN}\n{render(published)}\n{END}{rest.partition(END)[2]}"
    if whole == text:
        return 0
    if check:
        print(f"{readme.name} is not what benchmarks/published holds: run python -m benchmarks.readme", file=sys.stderr)
        return 1
    write_whole(readme, whole)
    return 0


def publish(results: Path, published: Path) -> None:
    """Take the figures of ``results`` over, without samples. Raises ValueError for a run that shows no figures."""
    reports = [file for file in (results / JSON_NAME, results / peer_figures.JSON_NAME) if file.is_file()]
    if not reports:
        raise ValueError(f"there is nothing to publish in {results.name}: run python -m benchmarks")
    published.mkdir(exist_ok=True)
    for file in reports:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("short"):
            raise ValueError(f"{file.name} is of a short run, whose figures say nothing about speed")
        if file.name == JSON_NAME:
            content = _merged(published / JSON_NAME, content)
        write_whole(published / file.name, json.dumps(_slim(content), indent=1, ensure_ascii=False) + "\n")


def _merged(file: Path, content: Json) -> Json:
    """Return the published sections with those of a new report laid over them, each with the facts of its run."""
    sections = json.loads(file.read_text(encoding="utf-8"))["sections"] if file.is_file() else {}
    facts = {name: content[name] for name in _KEPT if name in content}
    for section in content["sections"]:
        if section["errors"]:
            raise ValueError(f"section {section['name']} had wrong answers: {section['errors'][0]}")
        if section["figures"]:
            others = max(section.get("others_cpu_share") or [0.0])
            figures = [{name: figure.get(name) for name in _FIGURE} for figure in section["figures"]]
            sections[section["name"]] = {
                "title": section["title"], "figures": figures, "notes": section["notes"], "others_cpu_share": others, **facts,
            }  # fmt: skip
    return {"sections": {name: sections[name] for name in sorted(sections, key=_place)}}


def _place(name: str) -> int:
    return SECTIONS.index(name) if name in SECTIONS else len(SECTIONS)


def _slim(value: Any) -> Any:
    """Return the content with rounded figures and without paths of the machine, and without what only pictures need."""
    if isinstance(value, dict):
        return {name: _slim(item) for name, item in value.items() if name not in ("data", "samples", "curves_ms")}
    if isinstance(value, list):
        return [_slim(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return _PATH.sub("", value) if isinstance(value, str) else value


def render(published: Path) -> str:
    """Return what stands between the marks."""
    file, peers_file = published / JSON_NAME, published / peer_figures.JSON_NAME
    sections: dict[str, Json] = json.loads(file.read_text(encoding="utf-8"))["sections"] if file.is_file() else {}
    lines = []
    if sections:
        lines += [*_facts(sections), "", "| | median (lowest to highest) | bar |", "|---|---:|---|"]
        for section in sections.values():
            lines += [f"| **{section['title']}** | | |", *map(_row, shown(section["figures"]))]
    if peers := peer_figures.read(peers_file):
        run = _machine(json.loads(peers_file.read_text(encoding="utf-8")))
        lines += [
            "",
            f"Other servers, with the same model file, texts and load generator, one after another in one run; {run}.",
            "",
        ]
        lines += peer_figures.table(peers)
    return "\n".join(lines).strip() or NOT_YET


def shown(figures: Sequence[Json]) -> list[Json]:
    """Return the figures that the table names: those with a bar and headlines, or else ratios, or else the first few."""
    named = [figure for figure in figures if figure.get("bar") or figure.get("headline")]
    return named or [figure for figure in figures if figure["unit"] == "ratio"] or list(figures[:FEW])


def _facts(sections: Mapping[str, Json]) -> Iterator[str]:
    """Say on which machine, when, and of which commit the figures are."""
    seen = dict.fromkeys(_machine(section) for section in sections.values())
    yield "Medians of the runs; a ratio compares arms that took turns in one run. " + " ".join(
        f"{', '.join(_place_names(sections, line))}: {line}." if len(seen) > 1 else f"{line}." for line in seen
    )
    for name, section in sections.items():
        if section["others_cpu_share"] > OTHERS_NOTE_SHARE:
            yield f"Other programs took up to {section['others_cpu_share']:.0%} of all cores while {name} was measured."


def _machine(section: Json) -> str:
    machine = section.get("machine") or {}
    commit = str(machine.get("commit", "none"))
    changes = ", with changes" if commit.endswith("+changes") else ""
    return (
        f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB, "
        f"{str(section.get('started_at'))[:10]}, commit {commit.removesuffix('+changes')[:8]}{changes}"
    )


def _place_names(sections: Mapping[str, Json], line: str) -> list[str]:
    return [name for name, section in sections.items() if _machine(section) == line]


def _row(figure: Json) -> str:
    unit = "" if figure["unit"] == "ratio" else f" {figure['unit']}"
    low, middle, high = (
        number(figure[name]) if figure[name] is not None else "n/a" for name in ("low", "median", "high")
    )
    spread = f" ({low} to {high})" if len(figure["runs"]) > 1 else ""
    bar = figure.get("bar")
    sign = f"{'≥' if bar['at_least'] else '≤'} {bar['limit']:g}: {figure['verdict']}" if bar else ""
    return f"| {figure['name']} | {middle}{unit}{spread} | {sign} |"


if __name__ == "__main__":
    sys.exit(main())
