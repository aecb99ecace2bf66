"""The dashboard and the scrape configuration ask for metrics, events and paths that exist."""

import ast
import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from protocol.messages import StepReport
from services.monitor.pages import Pages
from services.monitor.service import RunGauges
from services.observability.metrics import Metrics
from services.settings.sections import Settings
from tests.integration.loop import ROOT

FOLDER = ROOT / "deploy/grafana"
EXPRESSIONS = [
    target["expr"]
    for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    for target in panel["targets"]
]


def literals() -> set[str]:
    """Every string in the services, f-strings by their constant parts."""
    found = set()
    for path in (ROOT / "services").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_dashboard_asks_for_metrics_that_exist() -> None:
    metrics = Metrics("trainer")
    registries = (metrics.registry, CollectorRegistry())
    RunGauges(registries[1])
    known = {family.name for registry in registries for family in registry.collect()}
    asked = {name for text in EXPRESSIONS for name in re.findall(r"tether_\w+", text)}
    assert asked
    assert {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in asked} <= known


def test_dashboard_asks_for_fields_of_a_step() -> None:
    asked = {name for text in EXPRESSIONS for name in re.findall(r'field="(\w+)"', text)}
    assert "reward_mean" in asked
    assert asked <= set(StepReport.__struct_fields__)


def test_dashboard_asks_for_events_and_kinds_that_are_counted() -> None:
    known = literals()
    for text in EXPRESSIONS:
        for exact in re.findall(r'(?:event|kind)="([\w.]+)"', text):
            assert exact in known, exact
        for pattern in re.findall(r'(?:event|kind)=~"([^"]+)"', text):
            for part in pattern.split("|"):
                assert any(re.fullmatch(part, value) for value in known), part


def test_targets_are_a_path_of_the_page(tmp_path: Path) -> None:
    path = re.search(r"url: http://127\.0\.0\.1:8080(\S+)", (FOLDER / "prometheus.yml").read_text())
    assert path is not None
    assert path[1] in Pages(Settings(), dict).routes()
