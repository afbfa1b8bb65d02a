"""The tensors behind the block pool.

Allocated once; block 0 takes the writes of padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.errors import ResourceError
from text_generation_inference.kernels.fp8 import FP8
from text_generation_inference.layers.cache import AnyCacheSpec, CrossCacheSpec
from text_generation_inference.units import gigabytes


def choose_dtype(asked: str | None, model_dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values; `asked` is the setting `kv_cache_dtype`."""
    return FP8 if asked == "fp8_e4m3fn" else model_dtype


def allocate(
    device: Device,
    caches: Sequence[AnyCacheSpec],
    num_blocks: int,
    num_picture_blocks: int = 1,
    num_window_blocks: int = 0,
) -> list[tuple[Tensor, ...]]:
    """Of each layer what its spec says: tensors `[blocks, block_size, heads, dim]`.

    Layers that read pictures by cross-attention have blocks of their own, `num_picture_blocks`; so have those that read
    a window, `num_window_blocks`, where that is not 0.
    """
    block_size = device.limits.block_size

    def count(spec: AnyCacheSpec) -> int:
        if isinstance(spec, CrossCacheSpec):
            return num_picture_blocks
        return num_window_blocks if num_window_blocks and spec.window is not None else num_blocks

    try:
        return [tuple(_zeros(device, count(spec), *shape, spec.dtype) for shape in spec.shapes) for spec in caches]
    except (RuntimeError, MemoryError) as error:
        num_tokens = num_blocks * block_size
        taken = sum(count(spec) * block_size * spec.bytes_per_token for spec in caches)
        raise ResourceError(
            f"Not enough memory for the KV cache: {gigabytes(taken)} for {num_tokens}"
            f" tokens could not be allocated ({error}). Lower `max_batch_total_tokens`."
        ) from None


def _zeros(device: Device, num_blocks: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    block_size = device.limits.block_size
    as_bytes = dtype is FP8 and not device.holds_fp8  # zero bits are 0.0
    stored = torch.uint8 if as_bytes else dtype
    if device.cache_by_head:
        return device.zeros((num_blocks, heads, block_size, dim), stored).view(dtype).transpose(1, 2)
    return device.zeros((num_blocks, block_size, heads, dim), stored).view(dtype)
