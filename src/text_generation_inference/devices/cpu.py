"""The CPU as a device.

Steps run on one worker thread, so that planning overlaps with computing; torch and the native kernels spread
each op over all cores.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from text_generation_inference.devices.at_once import AtOnce
from text_generation_inference.devices.host_memory import available_bytes, resident_bytes
from text_generation_inference.kernels.batch import Batch
from text_generation_inference.kernels.cpu import slots
from text_generation_inference.kernels.cpu.experts import NativeExperts
from text_generation_inference.kernels.cpu.fused_decode import MakeNativeFusedDecode
from text_generation_inference.kernels.cpu.latent import NativeLatentAttention
from text_generation_inference.kernels.cpu.low_bit import NativeLowBit
from text_generation_inference.kernels.cpu.ops import BLOCKS, NativeOps, load_ops
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.types import DeviceMemory, Limits

_WORKING_BYTES = 512 << 20
_TOWER_ROWS = 1024  # what comes of more than that is new memory from the system for each op


class CpuDevice(AtOnce):
    name = "cpu"
    description = "the CPU"
    comm_backend = "gloo"
    cache_by_head = False
    holds_fp8 = False
    supports_fp8 = True
    fp8_max = 448.0
    fp8_needs = ""
    runtime_bytes = 0

    def __init__(
        self, cache_dir: Path, custom_kernels: bool = True, num_threads: int | None = None, num_sharing: int = 1
    ) -> None:
        """`num_sharing`: ranks of all engines that compute here, each with its share of threads and memory."""
        super().__init__("tgi-cpu")
        self._num_sharing = num_sharing
        if num_threads is not None or num_sharing > 1:
            torch.set_num_threads(max(1, (num_threads or torch.get_num_threads()) // num_sharing))
        self.torch_device = torch.device("cpu")
        self.limits = Limits(
            block_size=16,
            dtypes=["float32", "bfloat16", "float16"],
            max_batch_size=64,
            max_batch_prefill_tokens=512,
            memory_share=0.5,
        )
        native = load_ops(cache_dir) if custom_kernels else None
        if isinstance(native, NativeOps):
            native.note_computing, self.tells_computing = self.note_computing, True
        self.ops = _native_ops(native) if isinstance(native, NativeOps) else _torch_ops(native)

    def free_bytes(self) -> int:
        """Without what steps and the process that answers HTTP will take: pages of the cache are handed out when they
        are first touched, and must be there then."""
        free = available_bytes()
        return (free - min(_WORKING_BYTES, free // 4)) // self._num_sharing

    def all_free_bytes(self) -> int:
        return self.free_bytes()

    def memory(self) -> DeviceMemory:
        """This process's own; what others have taken is not there for it."""
        resident = resident_bytes()
        return DeviceMemory(resident, resident + available_bytes())

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Pages that the system hands out, zeroed, when they are first touched: an unused cache costs nothing."""
        num_bytes = math.prod(shape) * dtype.itemsize
        pages = np.zeros(num_bytes, dtype=np.uint8)
        return torch.from_numpy(pages).view(dtype).view(shape)  # pyright: ignore[reportUnknownMemberType]

    def prepare(self, batch: Batch) -> Batch:
        return batch


def _torch_ops(reason: str | None) -> Ops:
    """They would widen a matrix of few bits for each product.

    reason: why there are no native ones, where these were asked for.
    """
    description = "reference ops" if reason is None else f"torch ops, slower than native kernels: {reason}"
    return Ops(description, low_bit_ops=frozenset(), gather_inputs=slots.gather_inputs)


def _native_ops(native: NativeOps) -> Ops:
    experts = NativeExperts(native)
    return Ops(
        native.description,
        pack_linear=native.pack_linear,
        tower_rows=_TOWER_ROWS,
        pack_blocks=native.pack_blocks,
        block_kinds=frozenset(BLOCKS),
        pack_experts=experts.pack_experts,
        pack_low_bit=NativeLowBit(native).pack_low_bit,
        experts=experts.experts,
        linear=native.linear,
        logits=native.logits,
        embedding=native.embedding,
        rms_norm=native.rms_norm,
        add_rms_norm=native.add_rms_norm,
        silu_mul=native.silu_mul,
        gelu_tanh_mul=native.gelu_tanh_mul,
        rotary_and_cache=native.rotary_and_cache,
        attention=native.attention,
        segment_attention=native.segment_attention,
        latent_attention=NativeLatentAttention(native).latent_attention,
        greedy=native.greedy,
        gather_inputs=slots.gather_inputs,
        make_fused_decode=MakeNativeFusedDecode(native),
    )
