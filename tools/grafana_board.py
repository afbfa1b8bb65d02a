"""Writes the Grafana board, deploy/grafana/dashboards/tgi.json: the panels of the dashboard, and more of the past.

The panels are a table here, since the JSON of a board is mostly the same words again. `--check` says whether the file
is what the table makes.
"""

import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "tgi.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF = '{job=~"$job",instance=~"$instance"}'
RATE = "[$__rate_interval]"


def of(**labels: str) -> str:
    """The board's choice of servers, and these labels."""
    more = "".join(f',{name}="{value}"' for name, value in labels.items())
    return OF[:-1] + more + "}"


def rate(metric: str, **labels: str) -> str:
    return f"rate({metric}{of(**labels)}{RATE})"


def total(metric: str, **labels: str) -> str:
    return f"sum({rate(metric, **labels)})"


def quantile(share: float, metric: str, **labels: str) -> str:
    return f"histogram_quantile({share}, sum by (le) ({rate(f'{metric}_bucket', **labels)}))"


def mean(metric: str) -> str:
    """Of all steps, of either method."""
    return f"{total(f'{metric}_sum')} / {total('tgi_batch_inference_count')}"


Query = tuple[str, str]  # legend, PromQL


def quantiles(metric: str) -> list[Query]:
    return [(f"p{round(share * 100)}", quantile(share, metric)) for share in (0.5, 0.95, 0.99)]


def stat(title: str, unit: str, *queries: Query) -> dict[str, Any]:
    options = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return _panel("stat", title, unit, list(queries), options=options)


def lines(title: str, unit: str, *queries: Query, stacked: bool = False, most: float | None = None) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 40 if stacked else 10, "showPoints": "never"}
    custom["stacking"] = {"mode": "normal" if stacked else "none"}
    options = {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
        "tooltip": {"mode": "multi"},
    }
    panel = _panel("timeseries", title, unit, list(queries), options=options, custom=custom)
    panel["fieldConfig"]["defaults"]["min"] = 0
    if most is not None:
        panel["fieldConfig"]["defaults"]["max"] = most
    return panel


def heat(title: str, metric: str) -> dict[str, Any]:
    query = f"sum by (le) (increase({metric}_bucket{OF}{RATE}))"
    options = {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Oranges", "exponent": 0.5, "steps": 64},
        "yAxis": {"unit": "s"},
        "cellGap": 1,
    }
    panel = _panel("heatmap", title, "s", [("{{le}}", query)], options=options)
    panel["targets"][0]["format"] = "heatmap"
    return panel


def _panel(
    kind: str,
    title: str,
    unit: str,
    queries: list[Query],
    options: dict[str, Any],
    custom: dict[str, Any] | None = None,
) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "datasource": SOURCE}
        for number, (legend, query) in enumerate(queries)
    ]
    defaults: dict[str, Any] = {"unit": unit, **({"custom": custom} if custom else {})}
    fields = {"defaults": defaults, "overrides": []}
    return {
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": fields,
        "options": options,
    }


FIRST, BETWEEN = "tgi_time_to_first_token_duration", "tgi_inter_token_duration"
TOKENS_OUT = f"{total(f'{FIRST}_count')} + {total(f'{BETWEEN}_count')}"
HITS = f"{total('tgi_cached_prompt_tokens')} / {total('tgi_prompt_tokens')}"
FAILED = f"sum by (err) ({rate('tgi_request_failure')})"

ROWS: list[tuple[str, int, list[dict[str, Any]]]] = [  # title, height, panels that share the width
    (
        "Now",
        4,
        [
            stat("Running", "short", ("", f"sum(tgi_batch_current_size{OF})")),
            stat("Waiting", "short", ("", f"sum(tgi_queue_size{OF})")),
            stat("Tokens/s out", "short", ("", TOKENS_OUT)),
            stat("Tokens/s in", "short", ("", total("tgi_prompt_tokens"))),
            stat("First token, p95", "s", ("", quantile(0.95, FIRST))),
            stat("Between tokens, p95", "s", ("", quantile(0.95, BETWEEN))),
            stat("KV cache", "percentunit", ("", f"max(tgi_kv_usage_ratio{OF})")),
            stat("Prefix hits", "percentunit", ("", HITS)),
        ],
    ),
    (
        "Requests",
        8,
        [
            lines(
                "Requests",
                "short",
                ("running", f"sum(tgi_batch_current_size{OF})"),
                ("waiting", f"sum(tgi_queue_size{OF})"),
                ("in flight", f"sum(tgi_requests_in_flight{OF})"),
            ),
            lines("Tokens per second", "short", ("out", TOKENS_OUT), ("in", total("tgi_prompt_tokens"))),
            lines(
                "Requests per second",
                "reqps",
                ("succeeded", total("tgi_request_success")),
                ("{{err}}", FAILED),
            ),
        ],
    ),
    (
        "Time to first token and between tokens",
        9,
        [
            heat("Time to first token", FIRST),
            lines("Time to first token, percentiles", "s", *quantiles(FIRST)),
            heat("Time between tokens", BETWEEN),
            lines("Time between tokens, percentiles", "s", *quantiles(BETWEEN)),
        ],
    ),
    (
        "Where the time of requests goes",
        8,
        [
            lines("Whole requests", "s", *quantiles("tgi_request_duration")),
            lines("In the queue", "s", *quantiles("tgi_request_queue_duration")),
            lines("Being checked", "s", *quantiles("tgi_request_validation_duration")),
            lines("In the batch", "s", *quantiles("tgi_request_inference_duration")),
        ],
    ),
    (
        "Cache",
        8,
        [
            lines("KV cache in use", "percentunit", ("{{instance}}", f"tgi_kv_usage_ratio{OF}"), most=1),
            lines("Prefix hits", "percentunit", ("of prompt tokens", HITS), most=1),
            lines("Preemptions", "short", ("{{instance}}", rate("tgi_preemptions"))),
        ],
    ),
    (
        "Steps",
        8,
        [
            lines(
                "Step time",
                "s",
                ("device", mean("tgi_batch_forward_duration")),
                ("taking results", mean("tgi_batch_decode_duration")),
                ("sending tokens", mean("tgi_batch_filter_duration")),
                stacked=True,
            ),
            lines(
                "Tokens in a step",
                "short",
                ("decode", f"{total('tgi_batch_tokens', method='decode')} / {total('tgi_batch_inference_count')}"),
                ("prompt", f"{total('tgi_batch_tokens', method='prefill')} / {total('tgi_batch_inference_count')}"),
                stacked=True,
            ),
            lines(
                "Steps per second",
                "short",
                ("{{method}}", f"sum by (method) ({rate('tgi_batch_inference_count')})"),
                ("{{method}} failed", f"sum by (method) ({rate('tgi_batch_inference_failure')})"),
            ),
        ],
    ),
    (
        "Lengths",
        8,
        [
            lines("Prompt tokens of a request", "short", *quantiles("tgi_request_input_length")),
            lines("Generated tokens of a request", "short", *quantiles("tgi_request_generated_tokens")),
        ],
    ),
    (
        "Devices, ranks and replicas",
        8,
        [
            lines(
                "Device memory",
                "bytes",
                ("{{instance}} {{replica}}", f"tgi_device_memory_used_bytes{OF}"),
                ("{{instance}} {{replica}}, all", f"tgi_device_memory_limit_bytes{OF}"),
            ),
            lines(
                "Servers, replicas and ranks",
                "short",
                ("servers", f"count(tgi_ranks{OF})"),
                ("replicas that take requests", f"sum(tgi_replica_up{OF})"),
                ("ranks", f"sum(tgi_ranks{OF})"),
            ),
            lines(
                "Running by replica",
                "short",
                ("{{instance}} {{replica}}", f"tgi_replica_batch_current_size{OF}"),
                stacked=True,
            ),
        ],
    ),
    (
        "Health",
        8,
        [
            lines("Errors per second", "reqps", ("{{err}}", FAILED), stacked=True),
            lines(
                "Restarts",
                "short",
                ("engine", f"sum(increase(tgi_engine_restarts{OF}{RATE}))"),
                ("http", f"sum(increase(tgi_api_restarts{OF}{RATE}))"),
            ),
            lines(
                "Since the engine's last sign of life", "s", ("{{instance}}", f"tgi_engine_heartbeat_age_seconds{OF}")
            ),
            lines("Event loop late, p99", "s", ("p99", quantile(0.99, "tgi_api_loop_lag_seconds"))),
        ],
    ),
]


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def build() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, height, row in ROWS:
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            }
        )
        top += 1
        width = 24 // len(row)
        for place, panel in enumerate(row):
            panels.append({**panel, "gridPos": {"x": place * width, "y": top, "w": width, "h": height}})
        top += height
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "tgi-server",
        "title": "Text generation",
        "tags": ["tgi"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}},
                variable("job", "label_values(tgi_ranks, job)"),
                variable("instance", 'label_values(tgi_ranks{job=~"$job"}, instance)'),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def main() -> int:
    text = json.dumps(build(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return int(FILE.read_text() != text)
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
