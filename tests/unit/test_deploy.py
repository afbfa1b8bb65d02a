"""The manifests of deploy/ against what they configure: flags, probes, metrics and times are this server's own."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from text_generation_inference.api.metrics import Metrics
from text_generation_inference.api.routes import ROUTES
from text_generation_inference.launch.arguments import build_parser, read_arguments
from text_generation_inference.ray_serve.options import read_args
from text_generation_inference.types import EngineLoad, ModelFacts

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
FILES = sorted(DEPLOY.rglob("*.yaml"))


def load(path: Path) -> Any:
    (document,) = yaml.safe_load_all(path.read_text())
    return document


def kinds() -> dict[str, Any]:
    """What the base holds, by kind."""
    named = load(BASE / "kustomization.yaml")["resources"]
    assert sorted(named) == sorted(path.name for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml")
    found = [load(BASE / name) for name in named]
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return kinds()["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def server(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(DEPLOY)) for path in FILES])
def test_every_file_is_one_document(path: Path) -> None:
    assert isinstance(load(path), dict)


def flags_of(words: list[str]) -> Any:
    parsed = build_parser("test", "").parse_args(words)
    return read_arguments(parsed, {}).config


def test_flags_are_the_launcher_s_and_streams_have_the_time_they_are_given(pod: dict, server: dict) -> None:
    config = flags_of([word for word in server["args"] if not word.startswith("--num-shard")])
    pause = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > config.graceful_termination_timeout + pause
    (port,) = server["ports"]
    assert port["containerPort"] == config.port >= 1024


def test_probes_ask_what_there_is(server: dict) -> None:
    public = {route.path for route in ROUTES if route.method == "GET" and route.public}
    for probe in ("startupProbe", "readinessProbe"):
        asked = server[probe]["httpGet"]
        assert asked["path"] in public and asked["port"] == server["ports"][0]["name"]
    assert server["livenessProbe"]["tcpSocket"]["port"] == "http"
    start = server["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800  # as the images' own health check


def test_shared_memory_and_weights_are_mounted(pod: dict, server: dict) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in server["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/data"]["persistentVolumeClaim"]["claimName"] == kinds()["PersistentVolumeClaim"]["metadata"]["name"]


def gauges() -> set[str]:
    metrics = Metrics(10, 20)
    facts = ModelFacts(
        model_id="m",
        dtype="",
        vocab_size=1,
        max_input_tokens=1,
        max_total_tokens=2,
        num_blocks=9,
        block_size=16,
        device="",
    )
    metrics.engine_ready(facts)
    metrics.load(EngineLoad(0, 0, 0, 0, 0, 0))
    return set(re.findall(r"# TYPE (\w+) gauge", metrics.render().decode()))


def test_the_autoscaler_reads_gauges_that_there_are() -> None:
    scaler = kinds()["HorizontalPodAutoscaler"]["spec"]
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]}
    assert asked <= gauges()
    (rule,) = load(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")["rules"]["custom"]
    listed = re.search(r'__name__=~"([^"]*)"', rule["seriesQuery"])
    assert listed is not None and set(listed[1].split("|")) == asked
    target = kinds()["Deployment"]
    assert scaler["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": target["metadata"]["name"],
    }
    assert "replicas" not in target["spec"]  # else each apply would undo what the autoscaler did


def at(document: Any, path: str) -> Any:
    for part in path.strip("/").split("/"):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


@pytest.mark.parametrize("overlay", ["cpu", "gaudi"])
def test_overlays_replace_what_is_there(overlay: str) -> None:
    document = load(DEPLOY / "kubernetes" / overlay / "kustomization.yaml")
    assert document["resources"] == ["../base"]
    for patch in document["patches"]:
        target = kinds()[patch["target"]["kind"]]
        assert target["metadata"]["name"] == patch["target"]["name"]
        for change in yaml.safe_load(patch["patch"]):
            assert change["op"] == "replace" and at(target, change["path"]) is not None
            if change["path"].endswith("/args"):
                flags_of(change["value"])
    (image,) = document["images"]
    assert image["name"] == kinds()["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"]


def check_serve_config(config: dict[str, Any]) -> float:
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    assert (module, name) == ("text_generation_inference.ray_serve", "app")
    assert config["http_options"]["request_timeout_s"] is None
    options, arguments = read_args(application["args"])
    build_parser("test", "").parse_args(arguments)
    return options.drain_timeout_s


def test_ray_s_own_file() -> None:
    check_serve_config(load(DEPLOY / "ray" / "serve.yaml"))


def test_kuberay_s_file() -> None:
    spec = load(DEPLOY / "kubernetes" / "rayservice.yaml")["spec"]
    drain_s = check_serve_config(yaml.safe_load(spec["serveConfigV2"]))
    (head,) = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    workers = [group["template"]["spec"] for group in spec["rayClusterConfig"]["workerGroupSpecs"]]
    for container in (head, *(worker["containers"][0] for worker in workers)):
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert float(variables["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= drain_s
    for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s
        (worker,) = group["template"]["spec"]["containers"]
        mounted = {mount["mountPath"] for mount in worker["volumeMounts"]}
        assert mounted >= {"/dev/shm", "/data"}
