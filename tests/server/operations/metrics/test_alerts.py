"""Alerts, the Grafana dashboard and docs/operations.md name settings, metrics and labels that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.operations.metrics import Exposition
from server.settings import Settings

ROOT = Path(__file__).resolve().parents[4]
RULES = [
    rule for group in yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
PANELS = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())["panels"]
BY_PROMETHEUS = {"up"}
WORDS = {"sum", "max", "min", "rate", "increase", "by", "le", "and", "offset", "histogram_quantile"}


@pytest.fixture
def families(standing, app):
    """What is measured; routes are such as were asked for."""
    app.submit()
    state = standing[0].state.mobizo
    return list(text_string_to_metric_families(Exposition(state.meters, state.database).text().decode()))


@pytest.fixture
def metric_labels(families):
    """Every sample's name with the values of each label."""
    labels_of = {}
    for family in families:
        for sample in family.samples:
            labels = labels_of.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return labels_of


def metrics(expression):
    """The names of the metrics in a PromQL expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\([a-z]+\)", " ", expression)
    return set(re.findall(r"\b[a-z_][a-z_]+\b", bare)) - WORDS


def test_every_metric_of_the_dashboard_exists(metric_labels):
    for panel in PANELS:
        for target in panel["targets"]:
            names = metrics(target["expr"])
            assert names, panel["title"]
            assert names <= set(metric_labels), panel["title"]
            grouped = re.findall(r"\bby \((\w+)\)", target["expr"])
            legend_labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            assert {*grouped, *legend_labels} - {"le"} <= {label for name in names for label in metric_labels[name]}, (
                panel["title"]
            )
    alerts = {word for panel in PANELS for word in re.findall(r"Mobizo\w+", panel["description"])}
    assert alerts <= {rule["alert"] for rule in RULES}


def test_every_metric_and_label_exists(metric_labels):
    mentioned_names = set()
    for rule in RULES:
        names = metrics(rule["expr"])
        assert names, rule["alert"]
        assert names <= set(metric_labels) | BY_PROMETHEUS, rule["alert"]
        mentioned_names |= names
        for name, selector in re.findall(r"\b([a-z_]+)\{([^}]*)\}", rule["expr"]):
            for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
                if label == "job":
                    continue  # Prometheus's own, which the operator chooses
                assert label in metric_labels[name], f"{rule['alert']}: {name} has no label {label}"
                if operator == "=" and label != "status":
                    assert value in metric_labels[name][label], f"{rule['alert']}: {name} is never {label}={value}"
    assert len(mentioned_names) > len(RULES) / 2


def test_every_rule_says_what_it_means():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
    documented = (ROOT / "docs" / "operations.md").read_text()
    for rule in RULES:
        assert rule["alert"] in documented


def test_every_setting_and_metric_of_the_page_exists(families):
    page = (ROOT / "docs" / "operations.md").read_text()
    fields = {f"MOBIZO_{name}".upper() for name in Settings.model_fields}
    other_variables = {"MOBIZO_NAME", "MOBIZO_SECRETS", "MOBIZO_MODELS"}
    assert {name.removesuffix("_FILE") for name in re.findall(r"MOBIZO_[A-Z_]+", page)} <= fields | other_variables
    mentioned_names = set(re.findall(r"`((?:mobizo|process)_[a-z_]+)", page)) - {"process_"}
    assert len(mentioned_names) > 10
    assert mentioned_names <= {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
