"""The Grafana board and the alert rules against what a real server tells Prometheus."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from boards import BOARD, DEPLOY, alert_rules, board_queries, groupings_of, selectors_of
from prometheus_client.parser import text_string_to_metric_families
from serving import Server

from text_generation_inference.api.metrics import Metrics
from text_generation_inference.types import StepStats

QUERIES = [*board_queries(), *(rule["expr"] for rule in alert_rules())]
OF_PROMETHEUS = {"job", "instance"}  # labels that it adds itself


def labels_of(text: str) -> dict[str, list[dict[str, str]]]:
    """Of each sample's name, all sets of labels. Names as they stand, without what the parser adds to counters."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total") if family.type == "counter" else sample.name
            found.setdefault(name, []).append(sample.labels)
    return found


@pytest.fixture(scope="module")
def told(server: Server) -> dict[str, list[dict[str, str]]]:
    """What a server tells that has worked and refused, and what only several engines or failures make it tell."""
    with server.client() as http:
        body = {"inputs": "One, two,", "parameters": {"max_new_tokens": 4}}
        assert http.post("/generate", json=body).status_code == 200
        body["parameters"] = {"temperature": -1.0}
        assert http.post("/generate", json=body).status_code == 422

        def text() -> str:
            return http.get("/metrics").text

        server.wait_for(lambda: "tgi_device_memory_used_bytes" in text(), "the engine to say how busy it is")
        found = labels_of(text())
    rare = Metrics(10, 20, num_replicas=2)
    rare.fail_step(prefill=False)
    rare.refuse_http("connections")
    rare.step(StepStats(False, 0, False, 1, 0, 0, 1, 1, 1, 1, 1))
    for err in ("generation", "incomplete", "timeout", "overloaded"):
        rare.fail_request(err)
    for name, labels in labels_of(rare.render().decode()).items():
        if re.match(r"tgi_(replica_|batch_inference_failure|http_refused|request_failure)", name):
            found.setdefault(name, []).extend(labels)
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_reads_what_a_server_tells(told: dict[str, list[dict[str, str]]], query: str) -> None:
    selectors = list(selectors_of(query))
    assert selectors
    for metric, labels in selectors:
        if metric == "up":
            continue
        assert metric in told
        for name, operator, value in labels:
            if name in OF_PROMETHEUS:
                assert value.startswith("$")
            elif operator == "=":
                assert any(of.get(name) == value for of in told[metric]), (name, value)
            elif operator == "=~":
                assert all(any(of.get(name) == word for of in told[metric]) for word in value.split("|"))
            else:
                assert any(name in of for of in told[metric])
        for name in groupings_of(query) - OF_PROMETHEUS:
            assert any(name in of for of in told[metric]), name


def test_a_name_that_there_is_not_is_found(told: dict[str, list[dict[str, str]]]) -> None:
    query = 'sum by (err) (rate(tgi_nothing{err="x"}[5m])) / on (job) tgi_ranks and up == 1'
    assert [each.metric for each in selectors_of(query)] == ["tgi_nothing", "tgi_ranks", "up"]
    assert "tgi_nothing" not in told and groupings_of(query) == {"err"}


def test_the_board_is_what_its_table_makes() -> None:
    tool = DEPLOY.parent / "tools" / "grafana_board.py"
    assert subprocess.run([sys.executable, tool, "--check"]).returncode == 0, "run tools/grafana_board.py"


def test_the_board_is_laid_out_and_provisioned() -> None:
    board = json.loads(BOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tgi.yaml").read_text())["providers"]
    assert source["type"] == "prometheus" and provider["type"] == "file"
    page = (DEPLOY.parent / "docs" / "dashboards.md").read_text()
    assert provider["options"]["path"] in page and "PROMETHEUS_URL" in page and source["url"] == "${PROMETHEUS_URL}"


def test_the_board_shows_what_the_dashboard_shows() -> None:
    """By the metrics that its script reads."""
    pages = Path(__file__).parents[2] / "src" / "text_generation_inference" / "api" / "pages" / "dashboard"
    script = "".join(path.read_text() for path in pages.glob("*.js"))
    named = set(re.findall(r"\b(tgi_[a-z_]+[a-z])\b", script))
    drawn = {each.metric for query in board_queries() for each in selectors_of(query)}
    drawn |= {re.sub(r"_(bucket|sum|count)$", "", name) for name in drawn}
    # Figures of a single server that a board has no use for, and names that are put together.
    apart = {"tgi_kv_blocks_used", "tgi_kv_blocks_total", "tgi_kv_block_tokens", "tgi_queue_tokens"}
    missing = {name for name in named - apart if not drawn & {name, re.sub(r"_(sum|count)$", "", name)}}
    assert len(named) > 20 and missing == set()


def test_alerts_say_what_they_are_about() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 10
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert scraped["rule_files"] == ["alerts.yaml"] and scraped["scrape_configs"][0]["job_name"] == "tgi"
