"""One Ray cluster for all tests of this folder: two replicas of the embedded model."""

import os
from collections.abc import Iterator

import pytest
import ray_environment
from ray_cluster import Cluster


@pytest.fixture(scope="session")
def ray_installed() -> None:
    if not ray_environment.is_ready():
        # A machine without a network skips these tests. CI has one, and nothing is left out there unseen.
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("Ray is not installed as the lock file says (python tests/ray_serve/ray_environment.py)")


@pytest.fixture(scope="session")
def cluster(ray_installed: None) -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        status = cluster.stop()
    assert status == 0
