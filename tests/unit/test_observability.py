"""Alert rules and dashboard: real PromQL over metrics that exist, and for each alert a section that helps."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from batch_consumer import metrics as consumer_metrics
from gateway import metrics as gateway_metrics
from tests.observability import (
    BY_PROMETHEUS,
    FOLDER,
    TARGET_LABELS,
    Expression,
    dashboard,
    expressions,
    family,
    panels,
    rules,
)
from tests.unit.compose_project import COMPOSE, ROOT, composed
from tests.unit.test_docs import anchors, shown_commands, source

EXPRESSIONS = list(expressions())
ALERTS = rules()
OPERATIONS = ROOT / "docs/operations.md"


@pytest.fixture(scope="module")
def declared() -> dict[str, set[str]]:
    """Every series of both doors with its labels, as their registries declare them."""
    gateway, consumer = gateway_metrics.Metrics(), consumer_metrics.Metrics()
    gateway.watch_dependencies(dict)
    consumer.watch(dict)
    consumer.watch_process(lambda: False, lambda: False, dict)
    found: dict[str, set[str]] = {}
    for registry in (gateway._registry, consumer.registry):
        found |= _declared(registry)
    return found


def _declared(registry: CollectorRegistry) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for collector, names in registry._collector_to_names.items():
        # Our own collectors describe families with labels; those of the library's process facts have none.
        own = [collector] if hasattr(collector, "_labelnames") else getattr(collector, "describe", list)()
        labels = {label for one in own for label in getattr(one, "_labelnames", ())}
        found |= {name: labels | ({"le"} if name.endswith("_bucket") else set()) for name in names}
    facts = {sample.name for family in registry.collect() for sample in family.samples}  # of the process itself
    return found | {name: set() for name in facts - set(found)}


def test_the_expressions_use_only_series_and_labels_that_the_doors_have(declared: dict[str, set[str]]) -> None:
    for one in EXPRESSIONS:
        known = set(TARGET_LABELS)
        for use in one.uses:
            if use.name not in BY_PROMETHEUS:
                assert use.name in declared, f"{one.where}: {one.text}"
                known |= declared[use.name]
                assert set(use.labels) <= declared[use.name] | TARGET_LABELS, f"{one.where}: {one.text}"
        assert one.grouped <= known, f"{one.where}: {one.text}"


def test_what_a_label_is_compared_with_is_a_value_that_the_code_gives() -> None:
    code = source("gateway", "batch_consumer", "serving", "jobs")
    for expression in EXPRESSIONS:
        for use in expression.uses:
            for label, values in use.labels.items():
                for value in values:
                    if label not in TARGET_LABELS | {"code"} and re.fullmatch(r"[\w/]+", value):
                        assert re.search(rf"[\"']{re.escape(value)}[\"']", code), f"{expression.where}: {label}={value}"


def test_every_metric_of_ours_is_in_the_dashboard(declared: dict[str, set[str]]) -> None:
    shown = {family(use.name) for panel in panels() for target in panel["targets"]
             for use in Expression(panel["title"], target["expr"]).uses}  # fmt: skip
    made = {family(name) for name in declared if name.startswith("twodoor_")}
    made -= {name for name in made if name.endswith("_created") or f"{name}_total" in made}
    # Told by alerts alone: it is a matter of one line in a log.
    assert made - shown == {"twodoor_keys_stale"}


def test_words_in_braces_are_labels_of_the_expression(declared: dict[str, set[str]]) -> None:
    texts = [(rule["alert"], rule["expr"], " ".join(rule["annotations"].values())) for rule in ALERTS]
    texts += [(p["title"], t["expr"], t["legendFormat"]) for p in panels() for t in p["targets"]]
    for where, expr, text in texts:
        uses = Expression(where, expr).uses
        known = TARGET_LABELS.union(*(declared.get(use.name, set()) for use in uses))
        named = set(re.findall(r"\{\{ *(?:\$labels\.)?(\w+)", text)) - {""}
        assert named <= known, where


# --- the rules


def test_every_alert_has_a_name_a_severity_and_what_a_reader_needs() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(set(names)) == len(names)
    for rule in ALERTS:
        assert re.fullmatch(r"Twodoor([A-Z][a-z]+)+", rule["alert"])
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "0m"))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_leads_to_a_section_that_names_it_and_shows_commands(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert ROOT / page == OPERATIONS
    assert anchor in anchors(OPERATIONS)
    section = _sections()[anchor]
    named = re.search(r"^\*Alert\*: (.*)$", section, re.MULTILINE)
    assert named is not None
    assert f"`{rule['alert']}`" in named[1]
    assert "*Cause*" in section
    block = re.search(r"^```sh\n.*?^```", section, re.MULTILINE | re.DOTALL)
    assert block is not None
    assert list(shown_commands(block[0])) or re.search(r"^(curl|psql) ", block[0], re.MULTILINE)


def test_the_operations_page_names_exactly_the_alerts_there_are() -> None:
    page = OPERATIONS.read_text(encoding="utf-8")
    named = [name for line in re.findall(r"^\*Alert\*: (.*)$", page, re.MULTILINE) for name in line.split(", ")]
    assert sorted(named) == sorted(f"`{rule['alert']}`" for rule in ALERTS)


def test_the_rules_own_tests_let_every_alert_fire_and_none_when_all_is_well() -> None:
    tests = yaml.safe_load((FOLDER / "alerts.test.yaml").read_text(encoding="utf-8"))["tests"]
    wanted = [one["exp_samples"] for test in tests for one in test["promql_expr_test"]]
    fired = {re.search(r'alertname="(\w+)"', sample["labels"])[1] for samples in wanted for sample in samples}  # type: ignore[index]
    assert fired == {rule["alert"] for rule in ALERTS}
    assert tests[0]["promql_expr_test"][0]["exp_samples"] == []


def _sections() -> dict[str, str]:
    """Return the text under each heading of the operations page, by its anchor."""
    parts = re.split(r"^## (.*)$", OPERATIONS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"): text
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


# --- the dashboard


def test_the_dashboard_can_be_imported_into_any_grafana() -> None:
    board = dashboard()
    assert board["uid"] == "twodoor"
    assert board["schemaVersion"] >= 36
    assert "id" not in board
    (variable,) = board["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == ("datasource", "datasource", "prometheus")
    for panel in panels():
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)


def test_no_two_panels_of_the_dashboard_share_a_number_or_a_place() -> None:
    every = dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        assert x + w <= 24
        cells = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert not cells & taken, panel["title"]
        taken |= cells


# --- the overlay of Compose


def test_the_overlay_reads_both_doors_and_stays_on_loopback() -> None:
    services = composed(COMPOSE, ROOT / "deploy/compose.observability.yaml", profiles=("cpu",))["services"]
    for name in ("prometheus", "grafana"):
        assert [port["host_ip"] for port in services[name]["ports"]] == ["127.0.0.1"]
        mounted = [Path(volume["source"]) for volume in services[name]["volumes"] if volume["type"] == "bind"]
        assert mounted
        assert [path for path in mounted if not path.exists()] == []
        assert set(services[name]["networks"]) == {"front", "back"}
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
    read = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))
    assert [FOLDER / name for name in read["rule_files"] if not (FOLDER / name).is_file()] == []
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in read["scrape_configs"]}
    named = {value for one in EXPRESSIONS for use in one.uses for value in use.labels.get("job", [])} - {"twodoor-.*"}
    assert named <= set(jobs)
    gateway, consumer = (services[name]["environment"] for name in ("gateway", "consumer"))
    assert str(jobs["twodoor-gateway"]["port"]) == gateway["TWODOOR_GATEWAY_PORT"]
    assert str(jobs["twodoor-consumer"]["port"]) == consumer["TWODOOR_CONSUMER_PORT"]
