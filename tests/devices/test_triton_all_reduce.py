"""Sums and gathers through memory that ranks share: ranks as processes, kernels through Triton's interpreter.

On a GPU `bench/cuda_ranks.py` does the same with ranks on one card.
"""

import importlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_interpreter import interpreter_as_hardware  # noqa: F401, a fixture

from text_generation_inference.kernels import fp8, reference
from text_generation_inference.kernels.fp8 import FP8, Fp8Rows, Fp8Weight

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from text_generation_inference.kernels.triton.all_reduce import BUFFER_BYTES, MAX_PROGRAMS, Peers

EPS = 1e-5
NEARLY_ALL = (2**31 - 60) // 3  # meetings: twenty more, and the count of three ranks' signals wraps


def given(rank: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values that cancel: summed in another order, or in fewer bits, they give something else."""
    torch.manual_seed(97 * call + rank)
    large = torch.where(torch.rand(shape) < 0.3, 1e4 * (-1) ** rank, 0.0)
    return (torch.randn(shape) + large).to(dtype)


def summed(world: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    total = given(0, call, shape, dtype).float()
    for rank in range(1, world):
        total = total + given(rank, call, shape, dtype).float()
    return total.to(dtype)


def check_sums(peers: Peers) -> None:
    """One after the other in the same buffers, of all sizes: fewer values than programs, several calls for one sum."""
    rank, world, call = peers.rank, peers.world, 0
    for shape, dtype in (((1, 24), torch.float32), ((3, 1000), torch.bfloat16), ((2, 3000), torch.float16)):
        for two_shot in (False, True):
            call += 1
            found = peers.all_reduce(given(rank, call, shape, dtype), two_shot)
            assert torch.equal(found, summed(world, call, shape, dtype)), (dtype, shape, two_shot)
    few = replace(peers, num_programs=1)
    values = few.most_values(torch.float32) + 700
    found = few.all_reduce(given(rank, 0, (values,), torch.float32), False)
    assert torch.equal(found, summed(world, 0, (values,), torch.float32))


def check_gathers(peers: Peers) -> None:
    world = peers.world
    for call, (shape, dtype) in enumerate(
        (((3, 7), torch.int64), ((5, 1, 3), torch.uint8), ((4, 500), torch.bfloat16))
    ):
        parts = [(given(rank, call, shape, torch.float32) * 10).to(dtype) for rank in range(world)]
        assert torch.equal(peers.all_gather(parts[peers.rank]), torch.stack(parts))
    few = replace(peers, num_programs=1)
    parts = [torch.arange(few.most_values(torch.int32) + 5, dtype=torch.int32) + rank for rank in range(world)]
    assert torch.equal(few.all_gather(parts[peers.rank]), torch.stack(parts))


def is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Without what `torch.testing` imports, in every rank."""
    away = (found.float() - expected.float()).abs()
    return bool((away <= tolerance * (1 + expected.float().abs())).all())


def check_norms(peers: Peers) -> None:
    rank, world = peers.rank, peers.world
    wide = Fp8Weight(torch.zeros(8, 384).to(FP8), torch.ones(8))
    squares = Fp8Weight(torch.zeros(128, 384).to(FP8), torch.ones(1, 3))
    cases: list[tuple[torch.dtype, Fp8Weight | None, int, bool]] = [
        (torch.float32, None, 1, True), (torch.bfloat16, None, 5, True), (torch.bfloat16, None, 1, False),
        (torch.bfloat16, wide, 3, True), (torch.bfloat16, squares, 3, False),
    ]  # fmt: skip
    for call, (dtype, quantize_for, rows, two_shot) in enumerate(cases):
        x, whole = given(rank, call, (rows, 384), dtype), summed(world, call, (rows, 384), dtype)
        residual, weight = torch.randn(rows, 384).to(dtype), torch.rand(384).to(dtype)
        assert peers.fits_norm(x)
        found, total = peers.add_rms_norm(x, residual, weight, EPS, two_shot, quantize_for)
        expected, expected_total = reference.add_rms_norm(whole, residual, weight, EPS, quantize_for)
        assert torch.equal(total, expected_total)
        if isinstance(found, Fp8Rows):
            assert isinstance(expected, Fp8Rows)
            found, expected = fp8.dequantize_rows(found), fp8.dequantize_rows(expected)
            assert is_close(found, expected, 0.07)
        else:
            assert isinstance(expected, Tensor)
            assert is_close(found, expected, 2e-5 if dtype is torch.float32 else 2e-2)


def leave_the_core_while_waiting() -> None:
    builder: Any = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    atomic = builder.create_atomic_rmw

    def patient(self: Any, *arguments: Any) -> Any:
        time.sleep(0.0002)  # ranks may be more than cores
        return atomic(self, *arguments)

    builder.create_atomic_rmw = patient


def run_rank(rank: int, buffers: list[Tensor], said: Any) -> None:
    torch.set_num_threads(1)
    leave_the_core_while_waiting()
    try:
        table = torch.tensor([buffer.data_ptr() for buffer in buffers])
        counts = torch.zeros(MAX_PROGRAMS, 2, dtype=torch.int32)
        counts[:, 0] = NEARLY_ALL
        peers = Peers(rank, len(buffers), table, counts, num_programs=2, max_polls=0)
        check_sums(peers)
        check_gathers(peers)
        check_norms(peers)
        said.send("")
    except BaseException:
        said.send(traceback.format_exc())
    os._exit(0)


def test_ranks_sum_on_one_card(device_name: str) -> None:
    """Eager and captured, by time slices: MPS is not everywhere."""
    if device_name != "cuda":
        pytest.skip("needs a GPU")
    program = Path(__file__).parents[2] / "bench" / "cuda_ranks.py"
    path = os.pathsep.join(each for each in sys.path if each)
    command = [sys.executable, str(program), "--ranks", "2", "--no-mps", "--check", "--seconds", "120"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ranks_sum_and_gather(device_name: str) -> None:
    world = 3
    if device_name != "cpu":
        pytest.skip("on a GPU kernels are not interpreted")
    buffers = [torch.zeros(BUFFER_BYTES, dtype=torch.uint8).share_memory_() for _ in range(world)]
    for buffer in buffers:
        buffer.view(torch.int32)[: 32 * MAX_PROGRAMS : 32] = 3 * NEARLY_ALL
    fork = multiprocessing.get_context("fork")  # the interpreter as it is here, and buffers at the same addresses
    ends = [fork.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        fork.Process(target=run_rank, args=(rank, buffers, said), daemon=True) for rank, (_, said) in enumerate(ends)
    ]
    for process in ranks:
        process.start()
    try:
        for rank, (heard, _) in enumerate(ends):
            assert heard.poll(60), f"rank {rank} hangs"
            assert not (error := heard.recv()), f"rank {rank}: {error}"
    finally:
        for process in ranks:
            process.kill()
