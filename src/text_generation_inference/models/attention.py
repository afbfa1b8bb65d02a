"""Attention as a spec describes it, with this rank's heads."""

from dataclasses import replace

import torch

from text_generation_inference.layers.attention import Attention, HeadLayout, SelfAttention
from text_generation_inference.layers.head_norm import HeadNorm
from text_generation_inference.layers.latent_attention import LatentAttention, LatentHeads
from text_generation_inference.layers.linear import Linear, row_linear
from text_generation_inference.layers.norm import RMSNorm
from text_generation_inference.layers.qkv import HeadRanges, Interleaved, qkv_parts
from text_generation_inference.models.model import Context
from text_generation_inference.models.spec import AttentionSpec, LatentSpec, TensorNames
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.declare import Arrangement, Part


def build_attention(context: Context, spec: AttentionSpec, hidden_size: int, names: TensorNames) -> SelfAttention:
    """Split by head."""
    if spec.latent is not None:
        return _build_latent(context, spec, spec.latent, hidden_size, names)
    ops, parallel, dim = context.ops, context.parallel, spec.head_dim
    heads, kv_heads = parallel.split_heads(spec.num_heads, spec.num_kv_heads)
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
        ones = torch.ones(dim, dtype=context.dtype, device=context.device)
        attention.q_norm = HeadNorm(ops, parallel, spec.qk_norm, ranges, False, interleaved, ones)
        attention.k_norm = HeadNorm(ops, parallel, spec.qk_norm, ranges, True, interleaved, ones)
    return attention


def _build_latent(
    context: Context, spec: AttentionSpec, latent: LatentSpec, hidden_size: int, names: TensorNames
) -> LatentAttention:
    """Latents are the same on every rank. Names are those that all families have for the parts."""
    ops, parallel = context.ops, context.parallel
    first, end = parallel.split(spec.num_heads)
    plain_dim, rope_dim, value_dim = latent.plain_dim, latent.rope_dim, latent.value_dim
    latent_dim, rank = latent.latent_dim, latent.query_rank

    def of_heads(name: str, rows: int, in_features: int, arrangement: Arrangement | None = None) -> Part:
        """This rank's heads of a matrix with so many rows for each."""
        whole = Part(f"{name}.weight", (spec.num_heads * rows, in_features), arrangement=arrangement)
        return whole if parallel.world == 1 else replace(whole, dim=0, start=first * rows, end=end * rows)

    def rotated_after(start: int) -> Arrangement | None:
        return Interleaved(start + rope_dim, rope_dim, start) if spec.interleaved else None

    q_norm, q_up = None, None
    if rank is None:
        queries = of_heads("q_proj", plain_dim + rope_dim, hidden_size, rotated_after(plain_dim))
    else:
        queries = Part("q_a_proj.weight", (rank, hidden_size))
        q_norm = RMSNorm(ops, Part("q_a_layernorm.weight", (rank,)), latent.norm)
        q_up = Linear(ops, [of_heads("q_b_proj", plain_dim + rope_dim, rank, rotated_after(plain_dim))])
    shape = (latent_dim + rope_dim, hidden_size)
    keys = Part("kv_a_proj_with_mqa.weight", shape, arrangement=rotated_after(latent_dim))
    kv_up = Matrix(ops, [of_heads("kv_b_proj", plain_dim + value_dim, latent_dim)], False, is_multiplied=False)
    kept = (first * value_dim, end * value_dim)
    return LatentAttention(
        ops,
        names.attention,
        LatentHeads(end - first, plain_dim, rope_dim, value_dim, latent_dim, spec.scale),
        down=Linear(ops, [queries, keys]),
        q_norm=q_norm,
        q_up=q_up,
        kv_norm=RMSNorm(ops, Part("kv_a_layernorm.weight", (latent_dim,)), latent.norm),
        kv_up=kv_up,
        out=row_linear(ops, parallel, names.out, spec.num_heads * value_dim, hidden_size, kept, False),
    )
