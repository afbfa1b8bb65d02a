"""The tensors behind the block pool.

Allocated once; block 0 takes the writes of padding.
"""

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.errors import ResourceError
from text_generation_inference.kernels.fp8 import FP8


def choose_dtype(asked: str | None, model_dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values; `asked` is the setting `kv_cache_dtype`."""
    return FP8 if asked == "fp8_e4m3fn" else model_dtype


def allocate(
    device: Device,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer: `[blocks, block_size, kv_heads, head_dim]`."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)

    as_bytes = dtype is FP8 and not device.holds_fp8  # zero bits are 0.0
    stored = torch.uint8 if as_bytes else dtype

    def zeros() -> Tensor:
        if device.cache_by_head:
            return device.zeros((num_blocks, num_kv_heads, block_size, head_dim), stored).view(dtype).transpose(1, 2)
        return device.zeros(shape, stored).view(dtype)

    try:
        return [(zeros(), zeros()) for _ in range(num_layers)]
    except (RuntimeError, MemoryError) as error:
        num_bytes = 2 * num_layers * num_blocks * block_size * num_kv_heads * head_dim * dtype.itemsize
        raise ResourceError(
            f"Not enough memory for the KV cache: {num_bytes / 1e9:.2f} GB for {num_blocks * block_size} tokens"
            f" could not be allocated ({error}). Lower `max_batch_total_tokens`."
        ) from None
