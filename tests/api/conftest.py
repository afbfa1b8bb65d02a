"""One server for all tests that do not harm it."""

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import Server


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model-cache")


@pytest.fixture(scope="session")
def server(model_cache: Path) -> Iterator[Server]:
    running = Server("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768", cache=model_cache)
    yield running
    assert running.stop() == 0, running.log[-3000:]


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
