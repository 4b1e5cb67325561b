"""The alert rules and the dashboard as data: their expressions, and which series and labels these use."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser
import yaml

FOLDER = Path(__file__).parents[1] / "deploy/observability"
BY_PROMETHEUS = {"up", "ALERTS"}
"""Series that Prometheus itself makes."""
TARGET_LABELS = {"job", "instance"}
"""Labels that Prometheus gives to every series it reads."""


@dataclass(frozen=True)
class Use:
    """One series of an expression: its name, the labels it is chosen by, and their values."""

    name: str
    labels: dict[str, list[str]]


@dataclass
class Expression:
    """One expression, where it stands, the series it uses and the labels it groups by."""

    where: str
    text: str
    uses: list[Use] = field(default_factory=list)
    grouped: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Grafana's own variable for a range; a fixed one parses the same.
        parsed = promql_parser.parse(self.text.replace("$__rate_interval", "1m"))
        promql_parser.walk(parsed, self._visit)

    def _visit(self, node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            self._visit(node.vector_selector)
        if isinstance(node, promql_parser.VectorSelector):
            labels: dict[str, list[str]] = {}
            for matcher in node.matchers.matchers:
                labels.setdefault(matcher.name, []).extend(re.split(r"\|", matcher.value))
            self.uses.append(Use(str(node.name), labels))
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            self.grouped |= set(node.modifier.labels)


def rules() -> list[dict[str, Any]]:
    """Return every alert rule."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return dict(json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8")))


def panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[Expression]:
    """Yield every expression of both files; raises ValueError where one is no PromQL."""
    for rule in rules():
        yield Expression(rule["alert"], rule["expr"])
    for panel in panels():
        for target in panel["targets"]:
            yield Expression(panel["title"], target["expr"])


def family(name: str) -> str:
    """Return a series' name without what a histogram adds to it."""
    return re.sub(r"(_seconds|_ratio)_(bucket|count|sum)$", r"\1", name)
