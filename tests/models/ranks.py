"""Runs one prompt through a model split over several processes."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.cpu import CpuDevice
from text_generation_inference.engine.rank import load_model
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.models.registry import read_config, read_quantization
from text_generation_inference.parallel import Parallel
from text_generation_inference.runner import kv_cache
from text_generation_inference.weights.source import ModelFolder

PROMPT = [5, 9, 200, 31, 77, 8, 15, 300, 2]


def logits_of_ranks(folder: Path, world: int) -> Tensor:
    """`[tokens, vocab]` logits of PROMPT, computed by `world` ranks."""
    with tempfile.TemporaryDirectory() as meeting:
        if world == 1:
            _run(0, 1, folder, Path(meeting))
        else:
            mp.spawn(_run, (world, folder, Path(meeting)), nprocs=world)
        results = [torch.load(Path(meeting) / f"{rank}.pt", weights_only=True) for rank in range(world)]
    for other in results[1:]:
        assert torch.equal(results[0], other), "ranks disagree"
    return results[0]


def _run(rank: int, world: int, folder: Path, meeting: Path) -> None:
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{meeting / 'store'}"
        dist.init_process_group("gloo", store, timedelta(seconds=60), rank=rank, world_size=world)
    device = CpuDevice(meeting, custom_kernels=False)
    config = read_config(folder)
    parallel = Parallel(rank, world)
    source = ModelFolder(model_id="tiny", path=folder, note="")
    model = load_model(
        ServerConfig(), source, config, read_quantization(config), device, torch.float32, parallel, lambda *_: None
    )
    cache = kv_cache.allocate(device, model.caches(torch.float32), num_blocks=4)
    model.bind(cache, 64)
    count = len(PROMPT)
    batch = Batch(
        input_ids=torch.tensor(PROMPT),
        positions=torch.arange(count),
        kv_index=16 + torch.arange(count),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        meta=PagedMeta(torch.tensor([[1]], dtype=torch.int32), 0, [0], [count], count),
    )
    with torch.inference_mode():
        torch.save(model.logits(model.forward(batch, cache)).clone(), meeting / f"{rank}.pt")
    if world > 1:
        dist.destroy_process_group()
