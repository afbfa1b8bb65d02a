"""Names and labels of the PromQL in deploy/: the Grafana board and the alert rules."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = DEPLOY / "grafana" / "dashboards" / "tgi.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
_WORDS = {"by", "and", "or", "unless", "on", "ignoring", "without", "group_left", "group_right", "bool", "offset"}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


class Selector(NamedTuple):
    metric: str
    labels: tuple[tuple[str, str, str], ...]  # name, operator, value


def board_queries() -> list[str]:
    panels = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def selectors_of(query: str) -> Iterator[Selector]:
    """Every metric that a query reads; functions, groupings and times are none."""
    query = re.sub(r"\[[^]]*\]", "", query)
    query = re.sub(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)", "", query)
    for found in _SELECTOR.finditer(query):
        name, labels = found[1], found[2]
        is_function = query[found.end() :].lstrip().startswith("(") and labels is None
        if not is_function and name not in _WORDS:
            yield Selector(name, tuple(_LABEL.findall(labels or "")))


def groupings_of(query: str) -> set[str]:
    return {label.strip() for labels in re.findall(r"\bby\s*\(([^)]*)\)", query) for label in labels.split(",")}
