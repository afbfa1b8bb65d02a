"""What towers are composed of: products, attention, feed-forwards and blocks of them, as a `BlockSpec` describes them.

The rows of all pictures of a call lie one after the other, `[rows, hidden]`; `Segments` says which of them attend to
each other.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.kernels.matrices import Weight, plain
from text_generation_inference.kernels.ops import ActivationOp, GateOp, Ops
from text_generation_inference.kernels.segments import Segments, cut
from text_generation_inference.layers.linear import Linear
from text_generation_inference.layers.norm import NormSpec, make_norm
from text_generation_inference.models.config import Config
from text_generation_inference.models.vision.tower import Parts
from text_generation_inference.pictures.rule import Normalisation
from text_generation_inference.weights.declare import Declared, Module, Part

# What configs call an activation -> what ops call it.
ACTIVATIONS = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


def activation_of(ops: Ops, name: str) -> Callable[[Tensor], Tensor]:
    """x `[rows, width]` -> activation(x), by a config's name for it."""
    table = {"silu": ops.silu, "gelu": ops.gelu, "gelu_tanh": ops.gelu_tanh, "quick_gelu": ops.quick_gelu}
    op: ActivationOp = {**table, "relu": ops.relu}[ACTIVATIONS[name]]
    return lambda x: cast(Tensor, op(x))


def gate_of(ops: Ops, name: str) -> Callable[[Tensor], Tensor]:
    """gate_up `[rows, 2 * width]` -> activation(gate) * up."""
    table = {"silu": ops.silu_mul, "gelu": ops.gelu_mul, "gelu_tanh": ops.gelu_tanh_mul}
    op: GateOp | None = table.get(ACTIVATIONS[name])
    if op is not None:
        return lambda x: cast(Tensor, op(x))
    activate = activation_of(ops, name)

    def run(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate) * up

    return run


_RUN = 16


class TowerLinear(Linear):
    """A product of a tower, stacked from its parts. In few bits where its checkpoint has it so, and plain otherwise:
    `quantize` leaves it alone.

    `pads_inputs`, `pads_outputs`: its width, or that of each part, may grow to what the device multiplies fastest. What
    is added are zeros; a matrix that is not plain stays as it is.
    """

    only_as_stored = True
    is_measured = False

    def __init__(
        self,
        ops: Ops,
        parts: list[Part],
        biases: list[Part] | None = None,
        pads_inputs: bool = False,
        pads_outputs: bool = False,
    ) -> None:
        super().__init__(ops, parts, biases)
        # Kernels in FP8 multiply runs of 16 values: what has others is widened when it is read.
        self.may_round = all(size % _RUN == 0 for part in parts for size in part.shape)
        self._pads_inputs, self._pads_outputs = pads_inputs, pads_outputs
        self.num_inputs = self.shape[1]  # with those that were added

    def finish(self) -> None:
        if isinstance(self.weight, Tensor):
            step = self.ops.fast_multiple
            if self._pads_inputs and (missing := -self.num_inputs % step):
                self.weight = F.pad(self.weight, (0, missing))
                self.num_inputs += missing
            if self._pads_outputs and (missing := -self.parts[0].shape[0] % step):
                each = self.weight.unflatten(0, (len(self.parts), -1))
                self.weight = F.pad(each, (0, 0, 0, missing)).flatten(0, 1)
                if self.bias is not None:
                    self.bias = F.pad(self.bias.unflatten(0, (len(self.parts), -1)), (0, missing)).flatten()
        super().finish()


def linear(
    ops: Ops,
    names: Sequence[str],
    sizes: Sequence[int],
    in_features: int,
    bias: bool,
    pads_inputs: bool = False,
    pads_outputs: bool = False,
) -> TowerLinear:
    """Weights `[size, in_features]` of these names, one below the other."""
    named = list(zip(names, sizes, strict=True))
    parts = [Part(f"{name}.weight", (size, in_features)) for name, size in named]
    biases = [Part(f"{name}.bias", (size,)) for name, size in named] if bias else None
    return TowerLinear(ops, parts, biases, pads_inputs, pads_outputs)


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

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream and normalise: (normalised, new residual)."""
        normed, total = self.norm.add(x, residual)
        return cast(Tensor, normed), total


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
    read = _read_scales if torch.compiler.is_compiling() else scales_of  # whose cache a compiler ignores, and says so
    mean, std = read(normalisation, pixels.device)
    return ((pixels.float() * normalisation.factor - mean) / std).to(dtype)


@cache
def scales_of(normalisation: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, `[3]`."""
    with torch.inference_mode(False):  # whoever asks first
        return _read_scales(normalisation, device)


def _read_scales(normalisation: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(normalisation.mean, device=device), torch.tensor(normalisation.std, device=device)


class MaskedRows:
    """Rows that attend to each other in runs of one length, but for those that are padding: nobody sees these. Queries
    may be others than the rows that are seen, as many for each run.

    A run that is all padding sees itself, so that all that comes of it is finite.
    """

    def __init__(self, real: Tensor, length: int) -> None:
        """real: `[rows]` bool, of those that are seen."""
        runs = real.view(-1, length)
        self._seen = (runs | ~runs.any(1, keepdim=True))[:, None, None]

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        runs = self._seen.shape[0]
        q, k, v = (each.view(runs, -1, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._seen, enable_gqa=k.shape[1] != q.shape[1])
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


class Attends(Protocol):
    """Who says which rows attend to which, where `Segments` cannot."""

    def attend(self, ops: Ops, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k and v `[rows, heads, dim]` -> `[rows, heads * dim]`."""
        ...


def attend(ops: Ops, q: Tensor, k: Tensor, v: Tensor, rows: Segments | Attends) -> Tensor:
    """q, k and v `[rows, heads, dim]` -> `[rows, heads * dim]`."""
    return ops.segment_attention(q, k, v, rows) if isinstance(rows, Segments) else rows.attend(ops, q, k, v)


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
        self.ops = ops
        self.name = spec.attention
        self.num_heads = spec.num_heads
        size, names = spec.hidden_size, spec.qkv
        self.qkv = linear(ops, names, [3 * size // len(names)] * len(names), size, spec.attention_bias)
        out_bias = spec.attention_bias if spec.out_bias is None else spec.out_bias
        self.out = linear(ops, [spec.out], [size], size, out_bias)
        self.norms: list[TowerNorm] = []
        if spec.qk_norm is not None:
            self.norms = [TowerNorm(ops, spec.qk_norm, each, size) for each in ("q_norm", "k_norm")]

    def forward(self, x: Tensor, segments: Segments | Attends, rotation: Tensor | None) -> Tensor:
        q, k, v = self.qkv.forward(x).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        if self.norms:
            q, k = (
                norm.forward(each.flatten(1)).view(each.shape) for norm, each in zip(self.norms, (q, k), strict=True)
            )
        if rotation is not None:
            q, k = self.ops.rotate_heads(q, k, rotation)
        return self.out.forward(attend(self.ops, q, k, v, segments))


class TowerFeedForward(Module):
    """down(activation(gate) * up), or down(activation(up)) where nothing is gated."""

    def __init__(
        self, ops: Ops, name: str, up: Sequence[str], down: str, sizes: tuple[int, int, int], act: str, bias: bool
    ) -> None:
        """sizes: in, between, out."""
        self.name = name
        self._most_rows = ops.tower_rows
        self.activate = gate_of(ops, act) if len(up) > 1 else activation_of(ops, act)
        size, width, out = sizes
        self.up = linear(ops, up, [width] * len(up), size, bias, pads_outputs=True)
        self.down = linear(ops, [down], [out], width, bias, pads_inputs=True)

    def forward(self, x: Tensor) -> Tensor:
        if self._most_rows and x.shape[0] > self._most_rows:
            return torch.cat([self.forward(rows) for rows in x.split(self._most_rows)])
        x = self.activate(self.up.forward(x))
        if missing := self.down.num_inputs - x.shape[1]:  # one of the two is not plain, and as wide as it is stored
            x = F.pad(x, (0, missing))
        return self.down.forward(x)


class Block(Module):
    def __init__(self, ops: Ops, name: str, spec: BlockSpec) -> None:
        self.ops, self.name = ops, name
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

    def forward(
        self, x: Tensor, added: Tensor | None, rows: Segments | Attends, rotation: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The stream, and what is still to be added to it: the norm that comes next does that on its way."""
        if added is None:
            normed = self.norm1.forward(x)
        else:
            normed, x = self.norm1.add(added, x)
        normed, x = self.norm2.add(self._gate(0, self.attention.forward(normed, rows, rotation)), x)
        return x, self._gate(1, self.feed_forward.forward(normed))

    def _gate(self, number: int, x: Tensor) -> Tensor:
        if self.scales:
            return self.scales[number].value * x
        return self.gates[number].value.tanh() * x if self.gates else x


def run_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    rows: Sequence[Segments | Attends],  # for each block
    rotation: Tensor | None = None,  # cosines, then sines of each row's angles, `[rows, dim]` float32
    wanted: Collection[int] = (),
) -> Parts[dict[int, Tensor]]:
    """x through blocks, left after each: the states behind so many blocks as are wanted, and that behind all."""
    states, pieces = {0: x}, _cut(blocks[0].ops.tower_rows if blocks else 0, x, rows, rotation)
    for number, block in enumerate(blocks, 1):
        for piece in pieces:
            piece.x, piece.added = block.forward(piece.x, piece.added, piece.rows[number - 1], piece.rotation)
        if number in wanted or number == len(blocks):
            for piece in pieces:
                assert piece.added is not None
                piece.x, piece.added = piece.x + piece.added, None
            states[number] = pieces[0].x if len(pieces) == 1 else torch.cat([piece.x for piece in pieces])
        yield
    return states


@dataclass(slots=True)
class _Piece:
    """Rows that go through a block together."""

    x: Tensor
    added: Tensor | None
    rows: Sequence[Segments | Attends]  # for each block
    rotation: Tensor | None


def _cut(most: int, x: Tensor, rows: Sequence[Segments | Attends], rotation: Tensor | None) -> list[_Piece]:
    segments = {id(each): each for each in rows if isinstance(each, Segments)}
    if not most or x.shape[0] <= most or any(id(each) not in segments for each in rows):
        return [_Piece(x, None, rows, rotation)]
    pieces: list[_Piece] = []
    for start, end in cut(segments.values(), most):
        within = {key: each.within(start, end) for key, each in segments.items()}
        angles = None if rotation is None else rotation[start:end]
        pieces.append(_Piece(x[start:end], None, [within[id(each)] for each in rows], angles))
    return pieces


def read_activation(config: Config, name: str, default: str) -> str:
    return config.choice(name, ACTIVATIONS, default)


def check_heads(config: Config, size: str, heads: str) -> tuple[int, int]:
    """The fields of these names: hidden size and heads that share it evenly."""
    hidden_size, num_heads = config.integer(size), config.integer(heads)
    if hidden_size % num_heads:
        raise config.wrong(heads, f"is {num_heads}, which does not divide `{size}` ({hidden_size})")
    return hidden_size, num_heads
