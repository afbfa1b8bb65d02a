"""After an assert on the GPU every later call in the process fails: no other test may run in it."""

import os

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _small_models(one_thread: None) -> None:
    """Of the whole folder."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(3)  # xdist reports this test and starts another worker for the rest
        pytest.exit(f"the GPU cannot be used any more after {nodeid}: {error}", returncode=3)
