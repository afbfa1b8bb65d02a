"""What tests of a device share: the native CPU kernels in each form that this machine can run; and after an assert on the
GPU, when every later call in the process fails, no other test may run in it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driving import start
from gaudi import use_stand_in
from hpu_batches import LIMITS

from text_generation_inference.engine.build import Engine
from text_generation_inference.kernels.cpu import build
from text_generation_inference.kernels.cpu.ops import NativeOps, load_ops

MARCHES = ["native", "x86-64-v3"]  # the second is the AVX2 path, which every machine that runs the first can run
if "avx512_vnni" in build.cpu_flags().split():
    MARCHES.append("x86-64-v4")  # AVX-512 without VNNI and AMX
if "amx_bf16" in build.cpu_flags().split():
    MARCHES.append("icelake-server")  # with VNNI, without AMX


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


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session", params=MARCHES)
def ops(request: pytest.FixtureRequest, cache_dir: Path) -> NativeOps:
    loaded = load_ops(cache_dir, threads=2, march=request.param)
    if isinstance(loaded, str):
        pytest.skip(loaded)
    return loaded


@pytest.fixture(scope="session")
def tiled(cache_dir: Path) -> NativeOps:
    """With AMX: the machine's, or what its instructions mean in plain C."""
    flags = build.cpu_flags().split()
    if "amx_bf16" in flags:
        loaded = load_ops(cache_dir, threads=2)
    elif "avx512bw" in flags:
        compiler = cache_dir / "cc"
        compiler.write_text(f'#!/bin/sh\nexec cc -include {Path(__file__).with_name("amx_emulation.h")} "$@" -O1\n')
        compiler.chmod(0o700)
        loaded = load_ops(cache_dir / "tiled", threads=2, compilers=[str(compiler)], march="x86-64-v4")
    else:
        pytest.skip("needs AVX-512")
    if isinstance(loaded, str):
        pytest.skip(loaded)
    assert loaded.uses_amx
    return loaded


@pytest.fixture(scope="module")
def hpu(device_name: str) -> Iterator[Any]:
    """A Gaudi card, or the CPU in its role."""
    if device_name not in ("cpu", "hpu"):
        pytest.skip("needs Gaudi, or the CPU in its role")
    if device_name == "cpu":
        use_stand_in()
    from text_generation_inference.devices.hpu import HpuDevice

    device = HpuDevice()
    yield device
    device.close()


@pytest.fixture
def start_hpu(hpu: Any) -> Iterator[Any]:
    """Engines on it, closed at the end."""
    engines: list[Engine] = []

    def begin(folder: Path, **chosen: Any) -> Engine:
        engines.append(start(folder, device="hpu", **{**LIMITS, **chosen}))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()
