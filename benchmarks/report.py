"""The report's files: JSON for programs, a Markdown table for readers; and the lines that say which bar was met."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peer_figures
from benchmarks.bench import Section
from benchmarks.peer_figures import Arm
from benchmarks.stats import Figure, number

JSON_NAME = "report.json"
TABLE_NAME = "report.md"
OTHERS_NOTE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Header:
    """What stands above the figures."""

    started_at: str
    short: bool
    machine: dict[str, object]
    load_before: dict[str, float]
    stack: str
    texts: str
    accuracy: float | None
    seconds: float


def write(
    folder: Path, header: Header, sections: Sequence[Section], pictures: Sequence[str], peers: Sequence[Arm] = ()
) -> None:
    """Write JSON and table into ``folder``, each whole or not at all. ``peers`` stand in the table as another run's."""
    content = {
        "started_at": header.started_at,
        "short": header.short,
        "seconds": round(header.seconds, 1),
        "machine": header.machine,
        "load_before": header.load_before,
        "stack": header.stack,
        "texts": header.texts,
        "accuracy": header.accuracy,
        "pictures": list(pictures),
        "sections": [_section_json(section) for section in sections],
    }
    write_whole(folder / JSON_NAME, json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n")
    write_whole(folder / TABLE_NAME, markdown(header, sections, pictures, peers))


def write_whole(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = file.with_name(file.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def _section_json(section: Section) -> dict[str, object]:
    return {
        "name": section.name,
        "title": section.title,
        "seconds": round(section.seconds, 1),
        "figures": [figure.as_json() for figure in section.figures],
        "notes": section.notes,
        "errors": section.errors,
        "others_cpu_share": section.others_cpu,
        "data": section.data,
    }


def finite(value: object) -> object:
    """JSON has no NaN and no Inf: they become null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(header: Header, sections: Sequence[Section], pictures: Sequence[str], peers: Sequence[Arm] = ()) -> str:
    """Return the report as a Markdown page."""
    lines = ["# Benchmark report", "", *_facts(header), ""]
    if header.short:
        lines += ["This is the short run: it shows that all works, its figures say nothing about speed.", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        if section.figures:
            lines += ["| figure | median | lowest to highest | runs | bar |", "|---|---:|---:|---:|---|"]
            lines += [_row(figure) for figure in section.figures] + [""]
        lines += [f"- {note}" for note in [*section.notes, _others(section)] if note]
        lines += [f"- **wrong:** {error}" for error in section.errors] + [""]
        lines += [f"![{section.name}]({name})\n" for name in pictures if name == f"{section.name}.png"]
    if peers:
        lines += [
            "## Other servers (of their own run, `python -m benchmarks.peers`)",
            "",
            *peer_figures.table(peers),
            "",
        ]
        lines += [f"![peers]({name})\n" for name in pictures if name == peer_figures.PICTURE_NAME]
    return "\n".join(lines).rstrip() + "\n"


def _facts(header: Header) -> list[str]:
    machine = header.machine
    accuracy = "" if header.accuracy is None else f", the model's accuracy on them {header.accuracy:.3f}"
    packages = machine.get("packages")
    versions = ", ".join(f"{name} {number}" for name, number in packages.items()) if isinstance(packages, dict) else ""
    return [
        f"- {header.started_at}, {header.seconds:.0f} s, commit {machine.get('commit')}",
        f"- {machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('memory_gib')} GiB, Linux {machine.get('kernel')}",
        f"- Python {machine.get('python')}; {versions}",
        f"- before the start: load {header.load_before['load_1min']:.2f}, {header.load_before['cpu_share']:.0%} of all cores in use",
        f"- stack: {header.stack}; texts: {header.texts}{accuracy}",
    ]


def _row(figure: Figure) -> str:
    spread = f"{number(figure.low)} to {number(figure.high)}" if len(figure.runs) > 1 else ""
    bar = f"{figure.bar}: {figure.verdict}" if figure.bar else ""
    unit = "" if figure.unit == "ratio" else f" {figure.unit}"
    return f"| {figure.name} | {number(figure.median)}{unit} | {spread} | {len(figure.runs)} | {bar} |"


def _others(section: Section) -> str:
    if not section.others_cpu:
        return ""
    worst = max(section.others_cpu)
    warning = " — **read these figures with care**" if worst > OTHERS_NOTE_SHARE else ""
    return f"Other programs took at most {worst:.0%} of all cores during a run{warning}."


def summary(header: Header, sections: Sequence[Section]) -> list[str]:
    """Return the lines for the screen: every figure with a bar, what to beware of, and everything that was wrong."""
    lines = [_line(figure) for section in sections for figure in section.figures if _on_screen(section, figure)]
    if header.short:
        lines.append("this is the short run: it shows that all works, its figures say nothing about speed")
    worst = max((share for section in sections for share in section.others_cpu), default=0.0)
    if worst > OTHERS_NOTE_SHARE:
        lines.append(f"beware: other programs took up to {worst:.0%} of all cores during a run")
    lines += [
        f"{section.name}: {note}" for section in sections for note in section.notes if note.startswith("not measured")
    ]
    return lines + [f"wrong: {section.name}: {error}" for section in sections for error in section.errors]


def _on_screen(section: Section, figure: Figure) -> bool:
    return figure.bar is not None or (section.name == "gap" and figure.name.endswith("largest"))


def _line(figure: Figure) -> str:
    unit = "" if figure.unit == "ratio" else f" {figure.unit}"
    bar = f", bar {figure.bar}: {figure.verdict}" if figure.bar else ""
    return f"{figure.name}: {number(figure.median)}{unit} ({number(figure.low)} to {number(figure.high)}){bar}"
