"""The manifests of deploy/kubernetes against Kubernetes' own schemas, old and new; unknown fields are refused."""

import subprocess
from pathlib import Path

import pytest
import ray_environment

BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"


@pytest.mark.parametrize("version", ["1.29", "1.36"])
def test_manifests_fit_the_schemas(ray_installed: None, version: str, tmp_path: Path) -> None:
    files = [path for path in sorted(BASE.glob("*.yaml")) if path.name != "kustomization.yaml"]
    # Kustomize writes labels and selectors into all of them; without it the schema misses one.
    deployment = (BASE / "deployment.yaml").read_text()
    labelled = deployment.replace("  template:\n    metadata:\n", _SELECTOR)
    assert labelled != deployment
    (tmp_path / "deployment.yaml").write_text(labelled)
    files = [path if path.name != "deployment.yaml" else tmp_path / "deployment.yaml" for path in files]
    command = [ray_environment.PYTHON, "-m", "kubernetes_validate", "--strict", "-k", version, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr + done.stdout
    assert (done.stdout + done.stderr).count("passed for resource") == len(files) == 5


_SELECTOR = """\
  selector:
    matchLabels: {app.kubernetes.io/name: tgi}
  template:
    metadata:
      labels: {app.kubernetes.io/name: tgi}
"""
