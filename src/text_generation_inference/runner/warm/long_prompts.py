"""Asks for the kernels of long prompts: they take longest to compile, and need no weights."""

import torch

from text_generation_inference.kernels.batch import PREFILL_TILE, Batch, PagedMeta
from text_generation_inference.layers.attention import Attention
from text_generation_inference.weights.declare import Module

_TOKENS = 1024  # of a prompt that is long for every kernel
_TILE_WORDS = 5  # see `PagedMeta.prefill_tiles`


def attend_long_prompt(model: Module, dtype: torch.dtype, device: torch.device, block_size: int) -> None:
    """Once for each layout of heads; numbers are made up."""
    found = [module for _, module in model.walk() if isinstance(module, Attention)]
    layers = {layer.heads: layer for layer in found if layer.is_plain and layer.sinks_part is None}
    for heads, layer in layers.items():
        q, k, v = (
            torch.empty((_TOKENS, number, heads.head_dim), dtype=dtype, device=device)
            for number in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        cache = torch.empty((1, block_size, heads.num_kv_heads, heads.head_dim), dtype=dtype, device=device)
        layer.ops.attention(q, k, v, cache, cache, _make_batch(device), heads.scale, heads.window, heads.softcap)


def _make_batch(device: torch.device) -> Batch:
    each = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
    one = torch.zeros(1, dtype=torch.int32, device=device)
    tiles = torch.zeros((_TOKENS // PREFILL_TILE, _TILE_WORDS), dtype=torch.int32, device=device)
    meta = PagedMeta(one[None], 0, [0], [_TOKENS], _TOKENS, table_rows=one, prefill_tiles=tiles)
    return Batch(each, each, each, one, meta)
