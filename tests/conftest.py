"""Options of the suite, and one server for all tests that do not harm it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the device suite runs where the packages of clients are missing
    import httpx2 as httpx
    from serving import Server

# Triton decides when it is first imported, which other conftest files do before options are parsed. Worker processes of
# pytest-xdist inherit the decision.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("cuda" in argument for argument in sys.argv[1:]):
    os.environ["TRITON_INTERPRET"] = "1"

# What a script starts in the background ignores Ctrl-C, and under nohup a closed window: so would all that tests start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="the device that tests/devices runs on: cpu, cuda or hpu")
    parser.addoption(
        "--long", action="store_true", help="tests/faults in full: every fault at every place, longer soaks"
    )


def pytest_sessionfinish() -> None:
    """What a failed test left open can keep the process from ending: then it says where, and ends all the same."""
    faulthandler.dump_traceback_later(120, exit=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-ranks` gives every server several ranks."""
    if os.environ.get("NUM_SHARD", "1") == "1":
        return
    for item in items:
        if item.get_closest_marker("one_rank"):
            item.add_marker(pytest.mark.skip(reason="is about one rank"))


@pytest.fixture(scope="session")
def device_name(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def long_run(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--long")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that more threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def variables_of_gaudi_stay() -> Iterator[None]:
    """Loading Gaudi's software sets a variable that settings are read from."""
    before = os.environ.get("PT_HPU_LAZY_MODE")
    yield
    if before is None:
        os.environ.pop("PT_HPU_LAZY_MODE", None)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty at first, and one for all workers: it is made for processes that start at the same time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp("model-cache")
    folder = tmp_path_factory.getbasetemp().parent / "model-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def server(model_cache: Path) -> Iterator[Server]:
    """The embedded model behind the launcher; tests/api and tests/faults share it."""
    from serving import Server

    limits = ("--max-total-tokens", "1024", "--max-batch-total-tokens", "32768")
    running = Server(*limits, "--ollama-api", cache=model_cache)
    yield running
    assert running.stop() == 0, running.log[-3000:]


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def prompt_event_loop(server: Server) -> Iterator[None]:
    """Whatever a test sends, the api process's event loop is never held up for long: others would notice."""
    before = server.num_late()
    yield
    assert server.num_late() == before
