"""What towers are composed of: products, attention, feed-forwards and blocks of them, as a `BlockSpec` describes them.

The rows of all pictures of a call lie one after the other, `[rows, hidden]`; `Segments` says which of them attend to
each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.matrices import Weight, plain
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.layers.linear import Linear
from text_generation_inference.layers.norm import NormSpec, make_norm
from text_generation_inference.models.config import Config
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.weights.declare import Declared, Module, Part


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the names that configs have for them
    "quick_gelu": _quick_gelu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
}


_RUN = 16


class TowerLinear(Linear):
    """A product of a tower, stacked from its parts. In few bits where its checkpoint has it so, and plain otherwise:
    `quantize` leaves it alone."""

    only_as_stored = True
    is_measured = False

    def __init__(self, ops: Ops, parts: list[Part], biases: list[Part] | None = None) -> None:
        super().__init__(ops, parts, biases)
        # Kernels in FP8 multiply runs of 16 values: what has others is widened when it is read.
        self.may_round = all(size % _RUN == 0 for part in parts for size in part.shape)


def linear(ops: Ops, names: Sequence[str], sizes: Sequence[int], in_features: int, bias: bool) -> TowerLinear:
    """Weights `[size, in_features]` of these names, one below the other."""
    named = list(zip(names, sizes, strict=True))
    parts = [Part(f"{name}.weight", (size, in_features)) for name, size in named]
    return TowerLinear(ops, parts, [Part(f"{name}.bias", (size,)) for name, size in named] if bias else None)


class Parameter(Module):
    """A tensor by itself."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.part = Part(name, shape)
        self.value: Tensor

    def declare(self) -> list[Declared]:
        return [Declared("value", [self.part])]


class TowerNorm(Module):
    """A norm on rows whose result is plain."""

    def __init__(self, ops: Ops, spec: NormSpec, name: str, size: int) -> None:
        self.norm = make_norm(ops, spec, name, size)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm.forward(x))


class PatchEmbedding(Module):
    """Squares of pixels to vectors: a convolution that never overlaps, which is a product.

    `num_frames`: moments that a patch spans in the checkpoint. A still picture is the same at all of them, so that
    their weights are added up; for videos they are kept as well.
    """

    def __init__(
        self, ops: Ops, name: str, patch_size: int, hidden_size: int, bias: bool, num_frames: int | None = None
    ) -> None:
        self.ops = ops
        self.patch_size = patch_size
        self.num_frames = num_frames
        self.of_frames: Weight
        frames = () if num_frames is None else (num_frames,)
        self.part = Part(f"{name}.weight", (hidden_size, 3, *frames, patch_size, patch_size))
        self.bias_part = Part(f"{name}.bias", (hidden_size,)) if bias else None
        self.weight: Weight
        self.bias: Tensor | None = None

    def declare(self) -> list[Declared]:
        biases = [] if self.bias_part is None else [Declared("bias", [self.bias_part])]
        return [Declared("weight", [self.part]), *biases]

    def finish(self) -> None:
        weight = plain(self.weight)
        if self.num_frames is not None:
            self.of_frames = self.ops.pack_linear(weight.permute(0, 2, 3, 4, 1).flatten(1).contiguous())
            weight = weight.float().sum(2).to(weight.dtype)
        self.dtype = weight.dtype
        # As pixels lie in a patch: rows, columns, colours.
        self.weight = self.ops.pack_linear(weight.permute(0, 2, 3, 1).flatten(1).contiguous())

    def cut(self, pixels: Tensor, normalisation: Normalisation) -> Tensor:
        """uint8 `[pictures, height, width, 3]` -> patches `[pictures, rows, columns, values]` in the tower's type.

        Pixels beyond the last whole patch are left out.
        """
        return self._cut(normalise(self._whole(pixels), normalisation, self.dtype))

    def cut_pixels(self, pixels: Tensor) -> Tensor:
        """The same with pixels as they are."""
        return self._cut(self._whole(pixels))

    def _whole(self, pixels: Tensor) -> Tensor:
        size, (_, height, width, _) = self.patch_size, pixels.shape
        return pixels[:, : height // size * size, : width // size * size]

    def _cut(self, values: Tensor) -> Tensor:
        size, (count, height, width, _) = self.patch_size, values.shape
        values = values.reshape(count, height // size, size, width // size, size, 3)
        return values.transpose(2, 3).reshape(count, height // size, width // size, -1)

    def cut_frames(self, pixels: Tensor, normalisation: Normalisation) -> Tensor:
        """uint8 `[frames, height, width, 3]` -> patches `[moments, rows, columns, values]`, of several frames each."""
        assert self.num_frames is not None
        cut = self.cut(pixels, normalisation).unflatten(0, (-1, self.num_frames))
        return cut.permute(0, 2, 3, 1, 4).flatten(3)

    def forward(self, patches: Tensor) -> Tensor:
        """`[rows, values]` -> `[rows, hidden]`."""
        return self.ops.linear(patches, self.weight, self.bias)

    def forward_frames(self, patches: Tensor) -> Tensor:
        """The same for patches of `cut_frames`."""
        return self.ops.linear(patches, self.of_frames, self.bias)


def normalise(pixels: Tensor, normalisation: Normalisation, dtype: torch.dtype) -> Tensor:
    """uint8 `[..., 3]` -> what the tower was trained on."""
    mean, std = scales_of(normalisation, pixels.device)
    return ((pixels.float() * normalisation.factor - mean) / std).to(dtype)


@cache
def scales_of(normalisation: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, `[3]`."""
    with torch.inference_mode(False):  # whoever asks first
        return torch.tensor(normalisation.mean, device=device), torch.tensor(normalisation.std, device=device)


class Segments:
    """Runs of rows that attend to each other, of lengths that may differ; queries and keys may have their own rows.

    Runs of equal lengths are computed together; where all are equal nothing is moved.
    """

    def __init__(self, queries: Sequence[int], device: torch.device, keys: Sequence[int] | None = None) -> None:
        self._groups: list[tuple[int, int, Tensor | None, Tensor | None]] = []
        keys = queries if keys is None else keys
        by_lengths: dict[tuple[int, int], list[tuple[int, int]]] = {}
        start, key_start = 0, 0
        for pair in zip(queries, keys, strict=True):
            by_lengths.setdefault(pair, []).append((start, key_start))
            start, key_start = start + pair[0], key_start + pair[1]
        for (length, key_length), starts in by_lengths.items():
            if len(by_lengths) == 1:
                self._groups.append((length, key_length, None, None))
                continue
            of_queries, of_keys = torch.tensor(starts).unbind(1)
            rows = (of_queries[:, None] + torch.arange(length)).flatten()
            key_rows = (of_keys[:, None] + torch.arange(key_length)).flatten()
            self._groups.append((length, key_length, rows.to(device), key_rows.to(device)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[rows, heads, dim]`, k and v `[key rows, kv heads, dim]` -> `[rows, heads * dim]`."""
        out = None
        for length, key_length, rows, key_rows in self._groups:
            if rows is None or key_rows is None:
                return _attend(q, k, v, length, key_length)
            out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2]) if out is None else out
            out[rows] = _attend(q[rows], k[key_rows], v[key_rows], length, key_length)
        assert out is not None, "there are no rows"
        return out


def _attend(q: Tensor, k: Tensor, v: Tensor, length: int, key_length: int) -> Tensor:
    q = q.view(-1, length, *q.shape[1:]).transpose(1, 2)
    k, v = (each.view(-1, key_length, *each.shape[1:]).transpose(1, 2) for each in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


class MaskedRows:
    """Rows that attend to each other in runs of one length, but for those that are padding: nobody sees these.

    A run that is all padding sees itself, so that all that comes of it is finite.
    """

    def __init__(self, real: Tensor, length: int) -> None:
        """real: `[rows]` bool."""
        runs = real.view(-1, length)
        self._seen = (runs | ~runs.any(1, keepdim=True))[:, None, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        runs, _, _, length = self._seen.shape
        q, k, v = (each.view(runs, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._seen)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


class Attends(Protocol):
    """Who says which rows attend to which."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k and v `[rows, heads, dim]` -> `[rows, heads * dim]`."""
        ...


Rotation = tuple[Tensor, Tensor]  # cosines and sines, `[rows, dim]` float32


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x `[rows, heads, dim]`, halves rotated together."""
    cos, sin = (each[:, None] for each in rotation)
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A block of a tower: x += A(n1 x); x += M(n2 x), with what a checkpoint calls its parts."""

    hidden_size: int
    num_heads: int
    width: int  # of the feed-forward
    activation: str
    norm: NormSpec
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one for all
    out: str = "out_proj"
    attention_bias: bool = True
    feed_forward: str = "mlp"
    up: tuple[str, ...] = ("fc1",)  # two where the first is a gate
    down: str = "fc2"
    feed_forward_bias: bool = True
    out_bias: bool | None = None  # where it is not as that of queries, keys and values
    qk_norm: NormSpec | None = None  # on all queries of a row, and all keys, together
    gates: tuple[str, ...] = ()  # numbers whose tanh is multiplied with what attention and feed-forward add
    scales: tuple[str, ...] = ()  # or vectors that are


class TowerAttention(Module):
    def __init__(self, ops: Ops, spec: BlockSpec) -> None:
        self.name = spec.attention
        self.num_heads = spec.num_heads
        size, names = spec.hidden_size, spec.qkv
        self.qkv = linear(ops, names, [3 * size // len(names)] * len(names), size, spec.attention_bias)
        out_bias = spec.attention_bias if spec.out_bias is None else spec.out_bias
        self.out = linear(ops, [spec.out], [size], size, out_bias)
        self.norms: list[TowerNorm] = []
        if spec.qk_norm is not None:
            self.norms = [TowerNorm(ops, spec.qk_norm, each, size) for each in ("q_norm", "k_norm")]

    def forward(self, x: Tensor, segments: Attends, rotation: Rotation | None) -> Tensor:
        q, k, v = self.qkv.forward(x).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        if self.norms:
            q, k = (
                norm.forward(each.flatten(1)).view(each.shape) for norm, each in zip(self.norms, (q, k), strict=True)
            )
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return self.out.forward(segments.attend(q, k, v))


class TowerFeedForward(Module):
    """down(activation(gate) * up), or down(activation(up)) where nothing is gated."""

    def __init__(
        self, ops: Ops, name: str, up: Sequence[str], down: str, sizes: tuple[int, int, int], act: str, bias: bool
    ) -> None:
        """sizes: in, between, out."""
        self.name = name
        self.is_gated = len(up) > 1
        self.activation = ACTIVATIONS[act]
        size, width, out = sizes
        self.up = linear(ops, up, [width] * len(up), size, bias)
        self.down = linear(ops, [down], [out], width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up.forward(x)
        if self.is_gated:
            gate, up = x.chunk(2, dim=-1)
            return self.down.forward(self.activation(gate) * up)
        return self.down.forward(self.activation(x))


class Block(Module):
    def __init__(self, ops: Ops, name: str, spec: BlockSpec) -> None:
        self.name = name
        size = spec.hidden_size
        self.norm1, self.norm2 = (TowerNorm(ops, spec.norm, each, size) for each in spec.norms)
        self.attention = TowerAttention(ops, spec)
        self.feed_forward = TowerFeedForward(
            ops,
            spec.feed_forward,
            spec.up,
            spec.down,
            (size, spec.width, size),
            spec.activation,
            spec.feed_forward_bias,
        )
        self.gates = [Parameter(gate, (1,)) for gate in spec.gates]
        self.scales = [Parameter(scale, (size,)) for scale in spec.scales]

    def forward(self, x: Tensor, segments: Attends, rotation: Rotation | None = None) -> Tensor:
        x = x + self._gate(0, self.attention.forward(self.norm1.forward(x), segments, rotation))
        return x + self._gate(1, self.feed_forward.forward(self.norm2.forward(x)))

    def _gate(self, number: int, x: Tensor) -> Tensor:
        if self.scales:
            return self.scales[number].value * x
        return self.gates[number].value.tanh() * x if self.gates else x


def read_activation(config: Config, name: str, default: str) -> str:
    return config.choice(name, ACTIVATIONS, default)


def check_heads(config: Config, size: str, heads: str) -> tuple[int, int]:
    """The fields of these names: hidden size and heads that share it evenly."""
    hidden_size, num_heads = config.integer(size), config.integer(heads)
    if hidden_size % num_heads:
        raise config.wrong(heads, f"is {num_heads}, which does not divide `{size}` ({hidden_size})")
    return hidden_size, num_heads
