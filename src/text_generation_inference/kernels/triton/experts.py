# pyright: basic, reportMissingImports=false
"""The op `experts`: which kernels compute a mixture of experts, and in which tiles.

Few tokens: two kernels that read each pair's matrices (`pair_products`). More: pairs are sorted by expert, multiplied
in tiles and summed (`grouped_products`). Matrices in few bits have kernels of their own for both (`experts_low_bit`).
The definition is `kernels.experts`.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from text_generation_inference.kernels import experts as reference
from text_generation_inference.kernels.fp8 import SQUARE, Fp8Weight
from text_generation_inference.kernels.fused_decode import FusedExperts
from text_generation_inference.kernels.matrices import Weight, plain
from text_generation_inference.kernels.triton import experts_low_bit, norms_rotary
from text_generation_inference.kernels.triton.expert_tiles import Tiling, choose_tiles, choose_tiling, find_form
from text_generation_inference.kernels.triton.experts_low_bit import LowBitTiling, multiply_pairs
from text_generation_inference.kernels.triton.gemv import choose_shape, vector_product
from text_generation_inference.kernels.triton.grouped_products import grouped_product, sort_pairs, sum_pairs
from text_generation_inference.kernels.triton.launch import dependent_launch, has_room
from text_generation_inference.kernels.triton.low_bit_codes import TritonLowBit, unpack_low_bit
from text_generation_inference.kernels.triton.low_bit_linear import quantize_rows as quantize_to_int8
from text_generation_inference.kernels.triton.pair_products import pair_down, pair_gate
from text_generation_inference.kernels.triton.quantize import BY_ROW, BY_SQUARE, PLAIN, STATIC, quantize_rows
from text_generation_inference.kernels.triton.routing import route

GATES = (None, "silu", "gelu_tanh", "clamped_swiglu")
_MAX_EXPERTS = 1024  # that one program has room for
_MAX_DOWN = 4  # rows of several experts in turn that a program of `pair_down` has registers for


def count_blocks(pairs: int, num_experts: int, bm: int) -> int:
    """The most that sorting may come to."""
    return min(pairs, (pairs + min(num_experts, pairs) * (bm - 1)) // bm)


class TritonExperts:
    """The op, for a GPU of this capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._fp8 = capability >= (8, 9)
        self._roomy = has_room(capability)

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        gate: str = "silu",
        biases: tuple[Tensor, Tensor] | None = None,
        scale_inputs: bool = False,
        by_pair: bool | None = None,
        tilings: tuple[Tiling, Tiling] | None = None,
    ) -> Tensor:
        """See `kernels.experts`. `by_pair` and `tilings` are for measuring: instead of what fits the number of rows."""
        tokens, hidden = x.shape
        num_experts, top_k = down.shape[0] // hidden, ids.shape[1]
        if not self.can_compute(gate, gate_up, num_experts):
            gate_up, down = (unpack_low_bit(w) if isinstance(w, TritonLowBit) else w for w in (gate_up, down))
            return reference.experts(x, ids, weights, gate_up, down, gate, biases, scale_inputs)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if tokens == 0:
            return out
        ids = ids.contiguous()
        if scale_inputs:
            x = (x[:, None].float() * weights[..., None]).to(x.dtype).flatten(0, 1)
        per_row = 1 if scale_inputs else top_k
        pairs = tokens * top_k
        few = pairs * 2 <= num_experts or tokens == 1
        few = few if by_pair is None else by_pair
        weighted = not scale_inputs
        if isinstance(gate_up, TritonLowBit) or isinstance(down, TritonLowBit):
            self._in_few_bits(x, ids, weights, gate_up, down, gate, biases, out, few, weighted, per_row)
            return out
        if few:
            _by_pair(x, ids, weights, gate_up, down, gate, biases, out, weighted=weighted, per_row=per_row)
            return out
        first, second = (None, None) if biases is None else biases
        gated = torch.empty((pairs, down.shape[1]), dtype=x.dtype, device=x.device)
        tile, tile_down = tilings or self._choose_tiles(tokens, top_k, gate_up, down)
        assert tile.bm == tile_down.bm
        groups = Groups.of(ids, num_experts, tile.bm)
        groups.multiply(Operands.of(x, gate_up), first, gated, tile, GATES.index(gate), per_row)
        made = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
        groups.multiply(Operands.of(gated, down), second, made, tile_down, 0, 1)
        _sum(made, weights, out, weighted)
        return out

    def _in_few_bits(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        gate: str,
        biases: tuple[Tensor, Tensor] | None,
        out: Tensor,
        few: bool,
        weighted: bool,
        per_row: int,
        add: bool = False,
    ) -> None:
        """One matrix may be in another form; then pairs are sorted, as that wants them."""
        first, second = (None, None) if biases is None else biases
        pairs, num_experts = ids.numel(), down.shape[0] // out.shape[1]
        tile = experts_low_bit.choose_tiling(pairs, num_experts, self._roomy)
        if few and isinstance(gate_up, TritonLowBit) and isinstance(down, TritonLowBit):
            tile, groups = replace(tile, bm=16), Groups.one_by_one(ids)
        else:
            groups = Groups.of(ids, num_experts, tile.bm)
        gated = torch.empty((pairs, down.shape[1]), dtype=x.dtype, device=x.device)
        self._multiply(groups, x, gate_up, first, gated, tile, GATES.index(gate), per_row)
        made = torch.empty((pairs, out.shape[1]), dtype=x.dtype, device=x.device)
        self._multiply(groups, gated, down, second, made, tile, 0, 1)
        _sum(made, weights, out, weighted, add)

    def _multiply(
        self,
        groups: "Groups",
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        out: Tensor,
        tile: LowBitTiling,
        gate: int,
        per_row: int,
    ) -> None:
        if isinstance(weight, TritonLowBit):
            if weight.quantizes_inputs:
                rows = quantize_to_int8(x, weight.input_scale)
                x = (rows.data.float() * rows.scale[:, None]).to(x.dtype)
            multiply_pairs(groups, x, weight, bias, out, tile, gate, per_row)
            return
        num_experts = weight.shape[0] // out.shape[1] // (2 if gate else 1)
        other = choose_tiling(groups.pairs, num_experts, gate > 0, _form(weight), self._roomy)
        groups.multiply(Operands.of(x, weight), bias, out, replace(other, bm=tile.bm, swap=False), gate, per_row)

    def _choose_tiles(self, tokens: int, top_k: int, gate_up: Weight, down: Weight) -> tuple[Tiling, Tiling]:
        hidden, width = gate_up.shape[1], down.shape[1]
        num_experts, forms = down.shape[0] // hidden, (_form(gate_up), _form(down))
        found = [choose_tiles(tokens, top_k, num_experts, hidden, width, form, self._roomy) for form in forms]
        # Matrices may be in two forms; both products have the same blocks of pairs.
        return found[0][0], replace(found[1][1], bm=found[0][0].bm)

    def can_compute(self, gate: str, gate_up: Weight, num_experts: int) -> bool:
        return gate in GATES and num_experts <= _MAX_EXPERTS and (self._fp8 or not isinstance(gate_up, Fp8Weight))

    def add_to_row(
        self,
        hidden: Tensor,
        norm: tuple[Tensor, float],
        experts: FusedExperts,
        gate_up: Weight,
        down: Weight,
        biases: tuple[Tensor, Tensor] | None,
    ) -> None:
        """What the experts make of a row `[1, hidden]` of the stream, normalised first, is added to it."""
        num_experts = experts.router.shape[0]
        scores = torch.empty((1, num_experts), dtype=torch.float32, device=hidden.device)
        x = cast(Tensor, norms_rotary.rms_norm(hidden, *norm))  # not quantised
        vector_product(x, plain(experts.router), scores, experts.router_bias)
        ids, weights = route(scores, experts.routing, experts.correction)
        top_k = experts.routing.top_k
        if isinstance(gate_up, TritonLowBit) or isinstance(down, TritonLowBit):
            self._in_few_bits(x, ids, weights, gate_up, down, experts.gate, biases, hidden, True, True, top_k, add=True)
            return
        _by_pair(x, ids, weights, gate_up, down, experts.gate, biases, hidden, weighted=True, per_row=top_k, add=True)


def _by_pair(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    gate: str,
    biases: tuple[Tensor, Tensor] | None,
    out: Tensor,
    *,
    weighted: bool,
    per_row: int,
    add: bool = False,
) -> None:
    """`per_row`: so many pairs in succession have the same row of x. `add`: to what is in out."""
    first, second = (None, None) if biases is None else biases
    gated = torch.empty((ids.numel(), down.shape[1]), dtype=x.dtype, device=x.device)
    _pair_gate(Operands.of(x, gate_up), ids, first, gated, gate, per_row)
    _pair_down(Operands.of(gated, down), ids, weights, second, out, weighted, add)


def _form(weight: Weight) -> str:
    if isinstance(weight, Fp8Weight):
        return find_form(weight.data.dtype, weight.by_square)
    return find_form(plain(weight).dtype, False)


@dataclass(slots=True)
class Operands:
    """Rows and the matrices of all experts, as kernels take them."""

    x: Tensor
    weight: Tensor
    x_scale: Tensor  # of those in FP8; else anything
    weight_scale: Tensor
    form: int

    @classmethod
    def of(cls, x: Tensor, weight: Weight) -> "Operands":
        if not isinstance(weight, Fp8Weight):
            return cls(x, plain(weight), x, x, PLAIN.value)
        if weight.input_bound is not None:
            x = x.clamp(-weight.input_bound, weight.input_bound)
        rows = quantize_rows(x, weight)
        form = BY_SQUARE if weight.by_square else BY_ROW if weight.input_scale is None else STATIC
        return cls(rows.data, weight.data, rows.scale, weight.scale, form.value)


@dataclass(slots=True)
class Groups:
    """Pairs sorted by expert, in blocks of `bm`."""

    order: Tensor
    owners: Tensor
    total: Tensor
    pairs: int
    blocks: int
    dependent: bool
    by_pair: bool = False  # each is a block of its own

    @classmethod
    def one_by_one(cls, ids: Tensor) -> "Groups":
        """Not sorted."""
        return cls(ids, ids, ids, ids.numel(), ids.numel(), dependent_launch(ids.shape[0]), True)

    @classmethod
    def of(cls, ids: Tensor, num_experts: int, bm: int) -> "Groups":
        pairs = ids.numel()
        blocks = count_blocks(pairs, num_experts, bm)
        order = torch.empty(blocks * bm, dtype=torch.int32, device=ids.device)
        owners = torch.empty(blocks, dtype=torch.int32, device=ids.device)
        total = torch.empty(1, dtype=torch.int32, device=ids.device)
        block = 512 if pairs <= 512 else 2048
        dependent = dependent_launch(ids.shape[0])
        sort_pairs[(num_experts,)](
            ids, order, owners, total, pairs, E=num_experts, BINS=triton.next_power_of_2(num_experts + 1), BM=bm,
            BLOCK=block, DEPENDENT=dependent, num_warps=block // 256, launch_pdl=dependent,
        )  # fmt: skip
        return cls(order, owners, total, pairs, blocks, dependent)

    def multiply(
        self, operands: Operands, bias: Tensor | None, out: Tensor, tile: Tiling, gate: int, per_row: int
    ) -> None:
        """`per_row`: so many pairs in succession have the same row."""
        n, k = out.shape[1], operands.weight.shape[1]
        assert operands.form != BY_SQUARE.value or (tile.bk == SQUARE and SQUARE % tile.bn == 0)
        grid = (self.blocks * triton.cdiv(n, tile.bn),)
        weight = operands.weight
        matrix = TensorDescriptor(weight, [*weight.shape], [k, 1], [tile.bn, tile.bk]) if tile.bulk else weight
        grouped_product[grid](
            operands.x, matrix, operands.x if bias is None else bias, out, self.order, self.owners, self.total,
            operands.x_scale, operands.weight_scale, operands.x.stride(0), self.pairs, self.blocks, k,
            N=n, K=k, TOP_K=per_row, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=tile.group, STAGES=tile.stages,
            SWAP=tile.swap, GATE=gate, FORM=operands.form, BIAS=bias is not None, WHOLE=k % tile.bk == 0,
            BULK=tile.bulk, DEPENDENT=self.dependent, num_warps=tile.warps, launch_pdl=self.dependent,
        )  # fmt: skip


def _sum(made: Tensor, weights: Tensor, out: Tensor, weighted: bool, add: bool = False) -> None:
    tokens, hidden = out.shape
    block = min(1024, triton.next_power_of_2(hidden))
    dependent = dependent_launch(tokens)
    sum_pairs[(tokens, triton.cdiv(hidden, block))](
        made, weights, out, WIDTH=hidden, TOP_K=made.shape[0] // tokens, BLOCK=block, WEIGHTED=weighted, ADD=add,
        DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip


def _pair_gate(operands: Operands, ids: Tensor, bias: Tensor | None, out: Tensor, gate: str, per_row: int) -> None:
    pairs, n = out.shape
    k = operands.weight.shape[1]
    bn, bk, warps = choose_shape(k)
    dependent = dependent_launch(ids.shape[0])
    pair_gate[(pairs, triton.cdiv(n, bn))](
        operands.x, ids, operands.weight, operands.x if bias is None else bias, out, operands.x_scale,
        operands.weight_scale, operands.x.stride(0), k, N=n, K=k, TOP_K=per_row, BN=bn, BK=bk, GATE=GATES.index(gate),
        FORM=operands.form, BIAS=bias is not None, DEPENDENT=dependent, num_warps=warps, launch_pdl=dependent,
    )  # fmt: skip


def _pair_down(
    operands: Operands, ids: Tensor, weights: Tensor, bias: Tensor | None, out: Tensor, weighted: bool, add: bool
) -> None:
    tokens, n = out.shape
    k = operands.weight.shape[1]
    bn, bk, warps = choose_shape(k)
    bn = min(bn, _MAX_DOWN)
    dependent = dependent_launch(tokens)
    pair_down[(tokens, triton.cdiv(n, bn))](
        operands.x, ids, weights, operands.weight, operands.x if bias is None else bias, out,
        operands.x_scale, operands.weight_scale, k, N=n, K=k, TOP_K=ids.shape[1], BN=bn, BK=bk,
        FORM=operands.form, BIAS=bias is not None, WEIGHTED=weighted, ADD=add, DEPENDENT=dependent, num_warps=warps,
        launch_pdl=dependent,
    )  # fmt: skip
