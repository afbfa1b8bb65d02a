"""Norms on the queries and keys of a layer, before they are rotated."""

from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import torch
from torch import Tensor

from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.norm import NormSpec
from text_generation_inference.layers.qkv import HeadRanges, Interleaved
from text_generation_inference.parallel import Parallel
from text_generation_inference.weights.declare import PLAIN_TENSORS, Declared, Float32Tensors, Module, Part


class NormOver(StrEnum):
    HEAD = "head"  # each head by itself, all with one weight
    OWN_HEAD = "own head"  # each head by itself, with a weight of its own
    ALL_HEADS = "all heads"  # all heads of a token together


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormSpec:
    norm: NormSpec
    over: NormOver = NormOver.HEAD
    names: tuple[str, str] = ("q_norm", "k_norm")
    one_tensor_each: bool = False  # weights of their own lie in a tensor for each head, numbered


class HeadNorm(Module):
    """The norm of the queries, or of the keys."""

    def __init__(
        self,
        ops: Ops,
        parallel: Parallel,
        spec: HeadNormSpec,
        ranges: HeadRanges,
        is_key: bool,
        interleaved: int,
        ones: Tensor,  # [head_dim]: the weight of norms that have none, which are of each head by itself
    ) -> None:
        self.ops = ops
        self.parallel = parallel
        self.spec = spec
        self.dim = ranges.head_dim
        self.count = ranges.num_kv_heads if is_key else ranges.num_heads
        self.kept = ranges.kv_heads if is_key else ranges.heads
        self.interleaved = interleaved
        self.counted = _counted(ranges) if is_key else (0, self.kept[1] - self.kept[0])
        self.stem = spec.names[is_key]
        self.weight = ones
        self.bias: Tensor | None = None

    def declare(self) -> list[Declared]:
        norm = self.spec.norm
        if not norm.has_weight:
            return []
        storage = Float32Tensors(norm.plus) if norm.keeps_float32 or norm.plus else PLAIN_TENSORS
        found = [Declared("weight", self._parts("weight"), storage)]
        return [*found, Declared("bias", self._parts("bias"))] if norm.bias else found

    def _parts(self, suffix: str) -> list[Part]:
        (start, end), dim = self.kept, self.dim
        if self.spec.over is NormOver.HEAD:
            return [Part(f"{self.stem}.{suffix}", (dim,))]
        if self.spec.over is NormOver.ALL_HEADS:
            return [Part(f"{self.stem}.{suffix}", (self.count * dim,), 0, start * dim, end * dim)]
        if self.spec.one_tensor_each:
            return [Part(f"{self.stem}.norms.{head}.{suffix}", (dim,)) for head in range(start, end)]
        return [Part(f"{self.stem}.{suffix}", (self.count, dim), 0, start, end)]

    def finish(self) -> None:
        if not self.spec.norm.has_weight:
            return
        for name in ("weight", "bias") if self.spec.norm.bias else ("weight",):
            value = getattr(self, name)
            if self.interleaved:
                value = Interleaved(self.dim, self.interleaved).apply(value.reshape(-1))
            setattr(self, name, value.view(-1, self.dim) if self.spec.over is NormOver.OWN_HEAD else value.view(-1))

    def forward(self, x: Tensor) -> Tensor:
        """x `[tokens, heads, head_dim]` -> the same, of norms that `HeadNorms` does not describe."""
        norm, over = self.spec.norm, self.spec.over
        if over is NormOver.ALL_HEADS:
            return self._over_all(x)
        if over is NormOver.HEAD:
            flat = x.reshape(-1, self.dim)
            return cast(Tensor, self.ops.layer_norm(flat, self.weight, self.bias, norm.eps)).view(x.shape)
        wide = x.float()
        if norm.is_centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * self.weight.float()
        return (wide if self.bias is None else wide + self.bias.float()).to(x.dtype)

    def _over_all(self, x: Tensor) -> Tensor:
        flat, norm = x.flatten(1), self.spec.norm
        if norm.is_centred and self.parallel.world == 1:
            return cast(Tensor, self.ops.layer_norm(flat, self.weight, self.bias, norm.eps)).view(x.shape)
        wide = flat.float()
        if norm.is_centred:
            wide = wide - self._mean(wide)
        wide = wide * torch.rsqrt(self._mean(wide.pow(2)) + norm.eps) * self.weight.float()
        return (wide if self.bias is None else wide + self.bias.float()).to(x.dtype).view(x.shape)

    def _mean(self, x: Tensor) -> Tensor:
        """Of the heads of all ranks, each counted once: `[tokens, heads * head_dim]` -> `[tokens, 1]`."""
        first, last = (head * self.dim for head in self.counted)
        return self.parallel.all_reduce(x[:, first:last].sum(-1, keepdim=True)) / (self.count * self.dim)


def _counted(ranges: HeadRanges) -> tuple[int, int]:
    """Of this rank's key/value heads those that no rank before it has: of a shared one the first rank has its first
    query."""
    queries = ranges.num_heads // ranges.num_kv_heads
    (first, last), start = ranges.kv_heads, ranges.heads[0]
    return -(-start // queries) - first, last - first
