"""deploy/alerts.yml speaks of metrics and labels that a server tells."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.operations.metrics.exposition import Exposition

ROOT = Path(__file__).resolve().parents[4]
RULES = [
    rule for group in yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
BY_PROMETHEUS = {"up"}
WORDS = {"sum", "max", "rate", "increase", "by", "le", "and", "offset", "histogram_quantile"}


@pytest.fixture
def told(fleet, standing, app):
    """Every sample's name with the values of each label; routes are such as were asked for."""
    app.submit()
    state = standing[0].state.mobizo
    found = {}
    for family in text_string_to_metric_families(Exposition(state.meters, state.database).text().decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def test_every_metric_and_label_exists(told):
    spoken = set()
    for rule in RULES:
        bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\([a-z]+\)", " ", rule["expr"])
        names = set(re.findall(r"\b[a-z_][a-z_]+\b", bare)) - WORDS
        assert names, rule["alert"]
        assert names <= set(told) | BY_PROMETHEUS, rule["alert"]
        spoken |= names
        for name, selector in re.findall(r"\b([a-z_]+)\{([^}]*)\}", rule["expr"]):
            for label, how, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector):
                if label == "job":
                    continue  # Prometheus's own, which the operator chooses
                assert label in told[name], f"{rule['alert']}: {name} has no label {label}"
                if how == "=" and label != "status":
                    assert value in told[name][label], f"{rule['alert']}: {name} is never {label}={value}"
    assert len(spoken) > len(RULES) / 2


def test_every_rule_says_what_it_means():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
    documented = (ROOT / "docs" / "operations.md").read_text()
    for rule in RULES:
        assert rule["alert"] in documented
