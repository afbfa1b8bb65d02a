"""Attention as a spec describes it, with this rank's heads."""

import torch

from text_generation_inference.layers.attention import Attention, HeadLayout
from text_generation_inference.layers.head_norm import HeadNorm
from text_generation_inference.layers.linear import Linear, row_linear
from text_generation_inference.layers.qkv import HeadRanges, qkv_parts
from text_generation_inference.models.model import Context
from text_generation_inference.models.spec import AttentionSpec, TensorNames
from text_generation_inference.weights.declare import Part


def build_attention(context: Context, spec: AttentionSpec, hidden_size: int, names: TensorNames) -> Attention:
    """Split by head."""
    ops, parallel, dim = context.ops, context.parallel, spec.head_dim
    heads = parallel.split(spec.num_heads, "the number of attention heads")
    kv_heads = parallel.split_kv_heads(spec.num_kv_heads)
    ranges = HeadRanges(spec.num_heads, spec.num_kv_heads, dim, heads, kv_heads)
    interleaved = spec.rope.rotary_dim if spec.interleaved else 0
    stored = (names.qkv, spec.qkv_layout, ranges)
    weights = qkv_parts(*stored, hidden_size, names.transposed, interleaved)
    biases = qkv_parts(*stored, None, False, interleaved) if spec.qkv_bias else None
    out = row_linear(
        ops,
        parallel,
        names.out,
        spec.num_heads * dim,
        hidden_size,
        (heads[0] * dim, heads[1] * dim),
        spec.out_bias,
        names.transposed,
    )
    layout = HeadLayout(
        heads[1] - heads[0],
        kv_heads[1] - kv_heads[0],
        dim,
        spec.scale,
        spec.window,
        spec.softcap,
        spec.rope.rotary_dim,
        spec.attention_chunk,
    )
    attention = Attention(ops, names.attention, Linear(ops, weights, biases), out, layout)
    attention.clip = spec.clip
    if spec.slopes:
        attention.slopes = torch.tensor(spec.slopes[slice(*heads)], dtype=torch.float32, device=context.device)
    if spec.sinks:
        attention.sinks_part = Part(f"{names.attention}.{spec.sinks}", (spec.num_heads,), 0, *heads)
    if spec.qk_norm is not None:
        attention.q_norm = HeadNorm(ops, parallel, spec.qk_norm, ranges, False, interleaved)
        attention.k_norm = HeadNorm(ops, parallel, spec.qk_norm, ranges, True, interleaved)
    return attention
