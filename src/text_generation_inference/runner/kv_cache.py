"""The tensors behind the block pool.

Allocated once; block 0 takes the writes of padding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from text_generation_inference.devices.device import Device
from text_generation_inference.errors import ResourceError
from text_generation_inference.kernels.fp8 import FP8
from text_generation_inference.layers.cache import AnyCacheSpec, CrossCacheSpec, bytes_per_token
from text_generation_inference.units import gigabytes


def choose_dtype(asked: str | None, model_dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values; `asked` is the setting `kv_cache_dtype`."""
    return FP8 if asked == "fp8_e4m3fn" else model_dtype


def allocate(
    device: Device, caches: Sequence[AnyCacheSpec], num_blocks: int, num_picture_blocks: int = 1
) -> list[tuple[Tensor, ...]]:
    """Of each layer what its spec says: tensors `[blocks, block_size, heads, dim]`.

    Layers that read pictures by cross-attention have blocks of their own, `num_picture_blocks`.
    """
    block_size = device.limits.block_size

    def zeros(spec: AnyCacheSpec) -> tuple[Tensor, ...]:
        count = num_picture_blocks if isinstance(spec, CrossCacheSpec) else num_blocks
        return tuple(_zeros(device, count, *shape, spec.dtype) for shape in spec.shapes)

    try:
        return [zeros(spec) for spec in caches]
    except (RuntimeError, MemoryError) as error:
        num_tokens = num_blocks * block_size
        raise ResourceError(
            f"Not enough memory for the KV cache: {gigabytes(num_tokens * bytes_per_token(caches))} for {num_tokens}"
            f" tokens could not be allocated ({error}). Lower `max_batch_total_tokens`."
        ) from None


def _zeros(device: Device, num_blocks: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    block_size = device.limits.block_size
    as_bytes = dtype is FP8 and not device.holds_fp8  # zero bits are 0.0
    stored = torch.uint8 if as_bytes else dtype
    if device.cache_by_head:
        return device.zeros((num_blocks, heads, block_size, dim), stored).view(dtype).transpose(1, 2)
    return device.zeros((num_blocks, block_size, heads, dim), stored).view(dtype)
