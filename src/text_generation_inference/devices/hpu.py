"""An Intel Gaudi card as a device.

The card's compiler makes a program for every shape it meets, so steps are padded to the bucket plan and the
passes of the plan become graphs. In lazy mode ops are gathered until `mark_step`, and a pass is captured whole; without
it `torch.compile` does the same. Steps are queued on one worker thread, and another waits until the card is past them,
so that the next one is queued while the card computes.
`habana_frameworks` is met in `kernels/hpu/bridge.py` alone.
"""

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from text_generation_inference.config import ServerConfig
from text_generation_inference.devices.at_once import AtOnce
from text_generation_inference.devices.device import GraphForward
from text_generation_inference.devices.hpu_graphs import (
    Call,
    CompiledLayers,
    GraphPasses,
    PackedInputs,
    PaddedPass,
    PureFunction,
    allow_many_shapes,
    by_layer,
    compiled,
    hpu_graphs,
    ungraphed,
)
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.block_lists import put_together, take_apart
from text_generation_inference.kernels.fp8 import FP8_MAX
from text_generation_inference.kernels.hpu.attention import HpuAttention
from text_generation_inference.kernels.hpu.bridge import is_present, load_bridge, memory_errors
from text_generation_inference.kernels.hpu.fp8 import Fp8Ops
from text_generation_inference.kernels.hpu.ops import load_ops
from text_generation_inference.kernels.hpu.pass_memo import PassMemo
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.kernels.packed import Layout, pack
from text_generation_inference.parallel.collectives import Collectives, Meeting
from text_generation_inference.types import ALONE, DeviceMemory, Limits, Place

BLOCK_SIZE = 128


@dataclass(frozen=True, slots=True)
class HpuSettings:
    lazy: bool | None = None  # None: as the environment says
    graphs: bool = True
    flash_attention: bool = True
    flash_attention_recompute: bool = True
    wide_softmax: bool = True  # when decoding
    memory_fraction: float = 0.8  # of what is free after loading; the rest is left to the run time
    graph_share: float = 0.1  # of that, for graphs

    @classmethod
    def of(cls, config: ServerConfig) -> "HpuSettings":
        return cls(
            lazy=config.pt_hpu_lazy_mode,
            graphs=config.enable_hpu_graph,
            flash_attention=config.use_flash_attention,
            flash_attention_recompute=config.flash_attention_recompute,
            wide_softmax=config.vllm_fp32_softmax is not False,
            memory_fraction=config.hpu_memory_fraction,
            graph_share=config.tgi_graph_reserved_mem,
        )


def rank_environment(place: Place) -> dict[str, str]:
    """By which the software finds the card of a rank: the one of its number among those that may be seen."""
    return {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank), "WORLD_SIZE": str(place.world)}


class HpuDevice(AtOnce):
    cache_by_head = False
    holds_fp8 = True  # in-place writes to bytes seen as numbers would copy the cache
    fp8_needs = "Gaudi 2 or later"

    def __init__(self, settings: HpuSettings | None = None, custom_kernels: bool = True, place: Place = ALONE) -> None:
        super().__init__("tgi-hpu")
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tgi-hpu-read")
        self._last: tuple[Future[Any], Future[Any]] | None = None  # step that was launched: when read, when queued
        self.settings = settings or HpuSettings()
        if place.world > 1:
            os.environ.update(rank_environment(place))
        self.bridge = bridge = load_bridge(self.settings.lazy)
        self.name = "hpu (emulated)" if bridge.emulated else "hpu"
        self.comm_backend = "gloo" if bridge.emulated else "hccl"
        self.torch_device = bridge.device
        self.description = f"{self.name}: {bridge.card}, software {bridge.software}"
        self.settle = bridge.synchronize
        self.fp8_max = bridge.fp8_max
        if not custom_kernels and 0 < bridge.fp8_max < FP8_MAX:  # torch's own ops reckon with FP8 up to 448
            self.fp8_max, self.fp8_needs = 0.0, "the card's own kernels (without `disable_custom_kernels`) on Gaudi 2"
        names = ("hpu_inference_set_env", "hpu_set_inference_env", "hpu_set_env")  # newest first
        next(getattr(bridge.core, name) for name in names if hasattr(bridge.core, name))()
        captures = self.settings.graphs and bridge.lazy
        self.limits = Limits(
            block_size=BLOCK_SIZE,
            dtypes=["bfloat16", "float32"],
            graphs=True,
            prompt_graphs=False,
            compiles_prompts=not bridge.lazy and self.settings.graphs,
            meters_memory=True,
            max_batch_size=32,
            max_batch_prefill_tokens=4096,
            memory_share=1 - self.settings.graph_share if captures else 1.0,
            buckets=True,
            keeps_tokens=True,
            reads_in_place=True,
            step_timeout_s=1800.0,  # a shape that was not warmed up is compiled
        )
        self._memo, self._fp8 = PassMemo(), Fp8Ops(bridge)
        self.ops = self._load_ops(custom_kernels)
        attention = getattr(self.ops.attention, "__self__", None)
        hand_over = attention.hand_over if isinstance(attention, HpuAttention) else None
        self._layers = None if bridge.lazy else CompiledLayers(hand_over)
        self.ops.run_layer = self._layers
        self._runtime_bytes: int | None = None  # never given away
        if not bridge.lazy:
            self.submit(allow_many_shapes)

    def _load_ops(self, custom_kernels: bool) -> Ops:
        settings, bridge = self.settings, self.bridge
        if bridge.lazy:
            mode = "lazy mode, HPU graphs" if settings.graphs else "lazy mode, no graphs"
        else:
            mode = "eager mode, torch.compile" if settings.graphs else "eager mode, op by op"
        if not custom_kernels:
            slower = f"torch ops on {self.description}, {mode}: slower than the card's own kernels"
            return Ops(slower, low_bit_ops=frozenset(), by_shape=self._by_shape, graphs_by_shape=settings.graphs)
        ops = load_ops(
            bridge,
            f"fused kernels on {self.description}, {mode}",
            settings.flash_attention,
            settings.flash_attention_recompute,
            settings.wide_softmax,
            self._memo,
            self._fp8,
        )
        ops.by_shape, ops.graphs_by_shape = self._by_shape, settings.graphs
        return ops

    @property
    def supports_fp8(self) -> bool:
        return self.fp8_max > 0

    def free_bytes(self) -> int:
        """Less what the run time keeps: a share of what was free when this was first asked, once weights are loaded."""
        free = self.all_free_bytes()
        if self._runtime_bytes is None:
            self._runtime_bytes = int(free * (1 - self.settings.memory_fraction))
        return max(0, free - self._runtime_bytes)

    def all_free_bytes(self) -> int:
        """With what the run time keeps: passes without a graph compute in it."""
        self.bridge.synchronize()
        return int(self.bridge.torch_hpu.mem_get_info()[0])

    def memory(self) -> DeviceMemory:
        free, total = self.bridge.torch_hpu.mem_get_info()
        return DeviceMemory(int(total) - int(free), int(total))

    @property
    def runtime_bytes(self) -> int:
        return self._runtime_bytes or 0

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """The most memory that work held at a time, beside what was held before."""
        card = self.bridge.torch_hpu
        self.bridge.synchronize()
        card.reset_peak_memory_stats()
        before = int(card.memory_allocated())
        work()
        self.bridge.synchronize()
        return max(0, int(card.max_memory_allocated()) - before)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A cache of four dimensions is a view of one that has the places of all blocks in one: see `kernels.hpu`."""
        if len(shape) != 4:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        blocks, block_size, *rest = shape
        return torch.zeros((blocks * block_size, *rest), dtype=dtype, device=self.torch_device).view(shape)

    def prepare(self, batch: Batch) -> Batch:
        """What is still on the host goes to the card, where graphs have not brought it."""
        if batch.input_ids.device.type == self.torch_device.type:
            return batch
        return put_together({name: tensor.to(self.torch_device) for name, tensor in take_apart(batch).items()})

    def join_ranks(self, meeting: Meeting) -> Collectives:
        """Lazily gathered ops are launched before each: a sum takes what was computed, not what is still to be."""
        self.bridge.load_ranks(meeting.world, meeting.rank, meeting.local_rank(socket.gethostname()))
        return meeting.connect(self.comm_backend, self.bridge.mark_step if self.bridge.lazy else None)

    def close(self) -> None:
        super().close()
        self._reader.shutdown(wait=True)
        self.bridge.synchronize()

    def fetch(self, found: Tensor) -> Tensor:
        there = found.clone()  # what a graph has left is overwritten by its next call, which may come before the copy
        self.bridge.mark_step()
        return torch.empty(found.shape, dtype=found.dtype).copy_(there, non_blocking=True)

    def launch(self, queue: Callable[[], Callable[[], Any]]) -> "Future[Any]":
        """The reader waits until the card is past it, and computes nothing there: ops are gathered by thread. A lack of
        memory is told then, by this step or by the one queued behind it, which is taken back with it."""
        before, begun_before = self._last if self._last is not None and not self._last[0].done() else (None, None)
        begun = self.submit(lambda: self._begin(queue, begun_before))

        def end() -> Any:
            lack = before.exception() if before is not None else None
            if isinstance(lack, torch.OutOfMemoryError):  # this one has computed with garbage, if it could
                wait([begun])
                raise torch.OutOfMemoryError(str(lack))
            finish, passed = begun.result()
            with memory_errors():
                passed.synchronize()
                return finish()

        ended = self._reader.submit(end)
        self._last = ended, begun
        return ended

    def _begin(
        self, queue: Callable[[], Callable[[], Any]], before: "Future[Any] | None"
    ) -> tuple[Callable[[], Any], Any]:
        """What reads the step's results, and the place in the card's queue where they are there. Nothing is queued
        behind a step that could not be: the reader may not have told yet."""
        if before is not None and (failure := before.exception()) is not None:
            raise failure
        with memory_errors():
            try:
                finish = queue()
                self.bridge.mark_step()
                passed = self.bridge.torch_hpu.Event()
                passed.record()
            except Exception:
                self.bridge.synchronize()  # what it lacked is told now, in place of what followed from that
                raise
        return finish, passed

    def wrap_graphs(
        self, forward: Callable[[Batch], Tensor], first: Callable[[Batch], object] | None = None
    ) -> GraphForward:
        self.bridge.synchronize()  # weights and caches were filled by another thread
        self._fp8.mark_constants()
        layers = self._layers if self.settings.graphs else None
        if layers is not None:
            call = PackedInputs(by_layer(layers, PaddedPass(forward)), self.torch_device)
            return GraphPasses(self.bridge, call, True, self._memo.clear)
        call = PackedInputs(self._graphs_of(PaddedPass(forward)), self.torch_device)
        return GraphPasses(self.bridge, call, self.settings.graphs, self._memo.clear)

    def _graphs_of(self, module: nn.Module) -> Call:
        if not self.settings.graphs:
            return ungraphed(module)
        return hpu_graphs(self.bridge, module) if self.bridge.lazy else compiled(module)

    def _by_shape(self, function: Callable[..., Any], keeps: bool = False) -> Callable[..., Any]:
        """See `Ops.by_shape`."""
        call = self._graphs_of(PureFunction(function, keeps))

        def run(*given: Tensor | np.ndarray) -> Any:
            there = [each for each in given if isinstance(each, Tensor)]
            sent = given[len(there) :]
            with memory_errors():
                about: tuple[Layout, ...] = ()
                if sent:
                    words, layout = pack({str(n): torch.as_tensor(each) for n, each in enumerate(sent)})
                    there, about = [*there, words.to(self.torch_device, non_blocking=True)], (layout,)
                out = call(there, False, *about)
                self.bridge.mark_step()
            return out

        return run


__all__ = ["BLOCK_SIZE", "HpuDevice", "HpuSettings", "is_present"]
