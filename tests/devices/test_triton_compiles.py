"""Every kernel compiles for real GPUs, without one: the interpreter is more lenient than the compiler.

In a process of its own, because Triton decides between the two when it is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
from compile_program import PROGRAM

from text_generation_inference.kernels.triton.attention import choose_decode, choose_prefill
from text_generation_inference.kernels.triton.expert_tiles import Tiling, choose_tiling
from text_generation_inference.kernels.triton.gemv import choose_shape as gemv_shape
from text_generation_inference.kernels.triton.gemv_fp8 import Shape
from text_generation_inference.kernels.triton.gemv_fp8 import choose_shape as gemv_fp8_shape
from text_generation_inference.kernels.triton.latent import choose_tiles
from text_generation_inference.kernels.triton.low_bit_codes import FLOATS
from text_generation_inference.kernels.triton.low_bit_codes import NUMBERS as TABLE
from text_generation_inference.kernels.triton.norms_rotary import gate_warps, heads_at_once
from text_generation_inference.kernels.triton.row_low_bit import choose_warps
from text_generation_inference.kernels.triton.small_gemm import TILINGS, SmallGemmTiling
from text_generation_inference.kernels.triton.small_gemm import choose_tiling as few_rows_tiling
from text_generation_inference.kernels.triton.small_gemm_low_bit import LowBitGemmTiling
from text_generation_inference.kernels.triton.small_gemm_low_bit import choose_tiling as low_bit_tiling

BF16, FP32, FP8 = "*bf16", "*fp32", "*fp8e4nv"
STRIDES = "q_token q_head out_token k_block k_token k_head v_block v_token v_head table_stride"
CACHE_STRIDES = "q_token q_head k_token k_head v_token v_head ck_block ck_token ck_head cv_block cv_token cv_head"
NUMBERS = dict.fromkeys(("scale", "softcap", "k_scale", "v_scale"), "fp32")


def words(text: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), "i32")


def decode(
    dtype: str, cache: str | None = None, d: int = 128, splits: int = 1, window: int = 0, softcap: bool = False,
    block: int = 64, group: int = 4, lanes: int = 0, dependent: bool = False, fast: bool = True,
    warps: int = 4, stages: int = 3, alibi: bool = False, sinks: bool = False, chunk: int = 0, asm: bool = False,
) -> tuple:  # fmt: skip
    types = {
        **dict.fromkeys(("q", "out"), dtype),
        **dict.fromkeys(("k_cache", "v_cache"), cache or dtype),
        **dict.fromkeys(("partial", "stats"), FP32),
        **dict.fromkeys(("counters", "tables", "table_rows", "seq_lens"), "*i32"),
        **NUMBERS,
        "slopes": FP32 if alibi else dtype,
        "sinks": FP32 if sinks else dtype,
        **words(STRIDES),
    }
    values = {
        "KV_HEADS": 8, "GROUP": group, "GROUP_PAD": group, "D": d, "D_PAD": 1 << (d - 1).bit_length(), "BLOCK_SIZE": 16,
        "BLOCK_N": block, "LANES": lanes, "SPLIT": splits > 1, "JOIN": 32 // group if splits > 1 else 1, "WINDOW": window,
        "SOFTCAP": softcap, "SAME_STRIDES": True, "SMALL": cache == FP8, "STAGES": stages, "DEPENDENT": dependent,
        "ALIBI": alibi, "SINKS": sinks, "CHUNK": chunk, "ASM": asm,
    }  # fmt: skip
    kernel = "decode_by_lane" if lanes else "decode_by_group"
    return "decode_attention", kernel, types, values, {"num_warps": warps, "num_stages": stages, "fast": fast}


def prefill(
    dtype: str, m: int, block: int, warps: int, stages: int, d: int = 128, cache: str | None = None, own: bool = True,
    prefix: bool = True, fast: bool = True, alibi: bool = False, sinks: bool = False, chunk: int = 0,
    window: int = 0,
) -> tuple:  # fmt: skip
    types = {
        **dict.fromkeys(("q", "k", "v", "out"), dtype),
        **dict.fromkeys(("k_cache", "v_cache"), cache or dtype),
        **dict.fromkeys(("tables", "tiles"), "*i32"),
        **NUMBERS,
        "slopes": FP32 if alibi else dtype,
        "sinks": FP32 if sinks else dtype,
        **words(STRIDES + " own_token_stride own_k_head own_v_head"),
    }
    values = {
        "GROUP": 4, "TILE_WORDS": 5, "SUB": 128 // m, "M": m, "D": d, "D_PAD": d, "BLOCK_SIZE": 16, "BLOCK_N": block,
        "WINDOW": window, "SOFTCAP": False, "OWN": own, "PREFIX": prefix, "SMALL": cache == FP8, "DEPENDENT": False,
        "ALIBI": alibi, "SINKS": sinks, "CHUNK": chunk,
    }  # fmt: skip
    return "prefill_attention", "prefill", types, values, {"num_warps": warps, "num_stages": stages, "fast": fast}


def gather(window: int) -> tuple:
    types = {
        **dict.fromkeys(("k", "v", "k_cache", "v_cache", "keys", "values"), BF16),
        **dict.fromkeys(("tables", "tile"), "*i32"), **dict.fromkeys(("k_scale", "v_scale"), "fp32"),
        **words("end own_token_stride own_k_head own_v_head k_block k_token k_head v_block v_token v_head table_stride"),
    }  # fmt: skip
    values = {"KV_HEADS": 8, "D": 128, "BLOCK_SIZE": 16, "ROWS": 64, "SMALL": False, "WINDOW": window, "TILE": 128}
    return "prefill_attention", "gather_prompt", types, values, {"num_warps": 4, "fast": True}


def bulk(
    m: int, block: int, warps: int, stages: int, d: int = 128, sinks: bool = False, chunk: int = 0
) -> tuple:  # fmt: skip
    types = {
        **dict.fromkeys(("q", "out"), BF16), **dict.fromkeys(("keys", "values"), f"tensordesc<bf16[{block}, {d}]>"),
        "tiles": "*i32", **dict.fromkeys(("scale", "softcap"), "fp32"), **words("q_token q_head out_token"),
        "sinks": FP32 if sinks else BF16,
    }  # fmt: skip
    values = {
        "GROUP": 4, "TILE_WORDS": 5, "SUB": 128 // m, "M": m, "D": d, "BLOCK_N": block, "WINDOW": 0, "SOFTCAP": False,
        "SINKS": sinks, "CHUNK": chunk,
    }  # fmt: skip
    return "bulk_attention", "prefill_in_bulk", types, values, {"num_warps": warps, "num_stages": stages, "fast": True}


def specialised(d: int, window: int = 0) -> tuple:
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, fp4_padded=False, cga_layout=[])"
    types = {
        "queries": f"tensordesc<bf16[64, {d}],{layout}>",
        **dict.fromkeys(("keys", "values"), f"tensordesc<bf16[128, {d}],{layout}>"),
        "out": BF16, "tiles": "*i32", "scale": "fp32", **words("num_tiles out_token one"),
    }  # fmt: skip
    values = {
        "HEADS": 32, "GROUP": 4, "TILE_WORDS": 5, "BLOCK_N": 128, "D": d, "STAGES": 2, "WINDOW": window,
    }  # fmt: skip
    return "hopper_attention", "prefill_warp_specialised", types, values, {"num_warps": 4, "fast": True}


def norm(form: int, dependent: bool = False, centred: bool = False) -> tuple:
    types = {
        **dict.fromkeys(("x", "residual", "weight", "bias", "total"), BF16), "out": FP8 if form else BF16, "eps": "fp32",
        **dict.fromkeys(("scales", "input_scale", "x_scales", "x_columns"), FP32), **words("x_row residual_row scales_row"),
    }  # fmt: skip
    values = {"WIDTH": 4096, "PAD": 4096, "ADD": True, "SCALED": form == 1, "FORM": form, "DEPENDENT": dependent}
    values |= {"CENTRED": centred, "WEIGHT": True, "BIAS": centred}
    return "norms_rotary", "_norm_kernel", types, values, {"num_warps": 8, "fast": True}


def sums(way: int, world: int, width: int = 8192, norm: bool = True, form: int = 0, dtype: str = BF16) -> tuple:
    """Over ranks: 1 one shot, 2 two shots, 3 gathers."""
    types = {
        **dict.fromkeys(("x", "out", "residual", "weight"), dtype), "normed": FP8 if form else dtype, "eps": "fp32",
        **dict.fromkeys(("scales", "input_scale"), FP32 if form else dtype), "table": "*i64", "counts": "*i32",
        **words("rank numel per_program residual_row scales_row"),
    }  # fmt: skip
    lanes = 1 << (world - 1).bit_length()
    values = {
        "WIDTH": width, "PAD": width, "WORLD": world, "LANES": lanes, "WAY": way, "NORM": norm, "FORM": form,
        "PROGRAMS": 64, "PLACE": 65536, "SHARE": max(128, width // lanes), "DEPENDENT": False, "TRIGGER": True,
        "MAX_POLLS": 1 << 27,
    }  # fmt: skip
    return "all_reduce", "_sum_kernel", types, values, {"num_warps": min(16, max(4, width // 512)), "fast": True}


def gate(form: int, width: int = 14336, activation: int = 1, gated: bool = True) -> tuple:
    types = {
        "x": BF16, "out": FP8 if form else BF16, **words("x_row scales_row"),
        **dict.fromkeys(("scales", "input_scale", "x_scales", "x_columns"), FP32),
    }  # fmt: skip
    block, rest = 1 << (width - 1).bit_length() if form == 1 else 2048, 0
    if form == 1 and width <= block * 3 // 4:
        block, rest = block // 2, 1 << (width - block // 2 - 1).bit_length()
    values = {
        "WIDTH": width, "BLOCK": block, "REST": rest, "ACTIVATION": activation, "GATED": gated, "SCALED": form == 1,
        "FORM": form, "DEPENDENT": False,
    }  # fmt: skip
    return "norms_rotary", "_gate_kernel", types, values, {"num_warps": gate_warps(block, rest), "fast": True}


def rotary(
    half: int, cache: str = BF16, scaled: bool = False, norm: int = 0, weight: str = BF16, hb: int = 16
) -> tuple:
    types = {
        **dict.fromkeys(("q_weight", "k_weight"), weight), "eps": "fp32",
        **dict.fromkeys(("q", "k", "v"), BF16), **dict.fromkeys(("k_cache", "v_cache"), cache), "cos_sin": FP32,
        **dict.fromkeys(("row_scales", "columns"), FP32), **dict.fromkeys(("k_scale", "v_scale"), "fp32"),
        **dict.fromkeys(("positions", "kv_index"), "*i64"), **words(CACHE_STRIDES),
    }  # fmt: skip
    values = {
        "BLOCK_SIZE": 16, "HEADS": 32, "KV_HEADS": 8, "D": 128, "D_PAD": 128, "HALF": half, "HALF_PAD": 64, "HB": hb,
        "SMALL": cache == FP8, "BACK": True, "SCALED": scaled, "NORM": norm, "DEPENDENT": False,
    }  # fmt: skip
    return "norms_rotary", "_rotary_kernel", types, values, {"num_warps": 4 if hb <= 16 else 8, "fast": True}


def rotated(heads: int, half: int) -> tuple:
    types = {**dict.fromkeys(("q", "k"), BF16), "cos_sin": FP32, **words("q_row q_head k_row k_head turn_row")}
    values = {"HEADS": heads, "KV_HEADS": heads, "HALF": half, "HALF_PAD": 1 << (half - 1).bit_length(), "HB": 16}
    return "rotate_heads", "_rotate_heads_kernel", types, values, {"num_warps": 4, "fast": True}


def gemv(k: int, shape: tuple[int, int, int]) -> tuple:
    types = {**dict.fromkeys(("x", "weight", "norm_weight", "bias", "out"), BF16), "eps": "fp32"}
    bn, bk, warps = shape
    values = {"N": 4096, "K": k, "K_PAD": 1 << (k - 1).bit_length(), "BN": bn, "BK": bk, **FUSED, "DEPENDENT": True}
    return "gemv", "_gemv_kernel", types, values, {"num_warps": warps, "fast": True}


def gemv_fp8(k: int, shape: Shape) -> tuple:
    types = {
        **dict.fromkeys(("x", "norm_weight", "bias", "out"), BF16), "weight": FP8, "eps": "fp32", "columns": "i32",
        **dict.fromkeys(("weight_scale", "input_scale"), FP32),
    }  # fmt: skip
    part = k // shape.parts
    values = {
        "N": 4096, "K": k, "K_PAD": 1 << (part - 1).bit_length(), "BN": shape.outputs, "STAGES": shape.stages, "FORM": 1,
        **FUSED, "GATE": int(k <= 4096), "PARTS": shape.parts,
    }  # fmt: skip
    if shape.parts > 1:
        types["out"] = FP32
        values |= dict.fromkeys(("NORM", "ADD", "BIAS"), False)
    return "gemv_fp8", "_gemv_fp8_kernel", types, values, {"num_warps": shape.warps, "fast": True}


def few_rows(tiling: SmallGemmTiling, bm: int, kind: str = FP8, n: int = 8192, k: int = 8192) -> tuple:
    types = {
        **dict.fromkeys(("x", "weight"), kind), **dict.fromkeys(("x_scale", "weight_scale", "partial"), FP32),
        "bias": BF16, "out": BF16, "counters": "*i32", **words("x_row out_row rows"),
    }  # fmt: skip
    if tiling.bulk:
        types |= {
            name: f"tensordesc<{kind[1:]}[{size}, {tiling.columns}]>"
            for name, size in (("x", bm), ("weight", tiling.outputs))
        }
    values = {
        "N": n, "K": k, "BM": bm, "BN": tiling.outputs, "BK": tiling.columns, "SPLITS": tiling.parts,
        "STAGES": tiling.stages, "WHOLE": True, "BIAS": False, "BULK": tiling.bulk, "DEPENDENT": False,
    }  # fmt: skip
    options = {"num_warps": tiling.warps, "fast": True, "roomy": bm > 32 or tiling.bulk}
    return "small_gemm", "_small_gemm_kernel", types, values, options


def grouped(tiling: Tiling, gate: int, form: int = 0) -> tuple:
    types = {
        **dict.fromkeys(("x", "weight"), FP8 if form else BF16), **dict.fromkeys(("bias", "out"), BF16),
        **dict.fromkeys(("x_scale", "weight_scale"), FP32), **dict.fromkeys(("order", "owners", "total"), "*i32"),
        **words("x_row pairs blocks columns"),
    }  # fmt: skip
    values = {
        "N": 768, "K": 2048, "TOP_K": 8, "BM": tiling.bm, "BN": tiling.bn, "BK": tiling.bk, "GROUP": tiling.group,
        "STAGES": tiling.stages, "SWAP": tiling.swap, "GATE": gate, "FORM": form, "BIAS": False, "WHOLE": True,
        "BULK": tiling.bulk, "DEPENDENT": False,
    }  # fmt: skip
    if tiling.bulk:
        types["weight"] = f"tensordesc<{(FP8 if form else BF16)[1:]}[{tiling.bn}, {tiling.bk}]>"
    return "grouped_products", "grouped_product", types, values, {"num_warps": tiling.warps, "fast": True}


def pairs(kernel: str, n: int, k: int, form: int = 0) -> tuple:
    bn, bk, warps = gemv_shape(k)
    types = {
        **dict.fromkeys(("x", "weight"), FP8 if form else BF16), **dict.fromkeys(("bias", "out"), BF16),
        **dict.fromkeys(("x_scale", "weight_scale", "weights"), FP32), "ids": "*i32", **words("x_row columns"),
    }  # fmt: skip
    values = {
        "N": n, "K": k, "TOP_K": 8, "BN": min(bn, 4), "BK": bk, "FORM": form, "BIAS": False, "DEPENDENT": False,
    }  # fmt: skip
    values |= {"GATE": 1} if kernel == "pair_gate" else {"WEIGHTED": True, "ADD": True}
    return "pair_products", kernel, types, values, {"num_warps": warps, "fast": True}


def routing(num_experts: int, groups: int, top_k: int, kind: int) -> tuple:
    types = {
        **dict.fromkeys(("scores", "correction", "weights"), FP32), "ids": "*i32", "factor": "fp32", **words("scores_row"),
    }  # fmt: skip
    values = {
        "GROUPS": groups, "PER": num_experts // groups, "G_PAD": groups, "P_PAD": num_experts // groups,
        "TOP_GROUPS": (groups + 1) // 2, "TOP_K": top_k, "KIND": kind, "CORRECTED": kind == 1, "NORMALIZED": kind == 1,
        "DEPENDENT": False,
    }  # fmt: skip
    return "routing", "route_kernel", types, values, {"num_warps": 1, "fast": True}


LOW_BIT = {
    "words": "*i32", "scale": "*fp16", "offset": FP32, "table": FP32, **words("x_row out_row columns_row pairs blocks"),
    "rows": "i32",
}  # fmt: skip


def low_bit(
    tiling: LowBitGemmTiling, one: bool = False, dependent: bool = False, roomy: bool = False, **changes: int
) -> tuple:
    types = {
        **dict.fromkeys(("x", "bias", "out"), BF16), **LOW_BIT, "order": "*i32", "partial": FP32, "counters": "*i32",
    }  # fmt: skip
    if changes.get("OFFSET") == 2:
        types["offset"] = "*u8"
    values = {
        "N": 4096, "K": 4096, "GS": 128, "BITS": 4, "BM": tiling.bm, "BN": tiling.bn, "SPLITS": tiling.splits,
        "STAGES": tiling.stages, "UNROLL": tiling.unroll, "ONE": one, "IN_PAIRS": False, "GATE": int(one), "ADD": False, "BIAS": False,
        "TABLE": 0,
        "OFFSET": 0, "ORDER": False, "SPREAD": False, "SWAP": tiling.swap, "ASM": 0,
        "DEPENDENT": dependent, "WARPS": tiling.warps, "COLUMNS": int(tiling.paired), **changes,
    }  # fmt: skip
    return (
        "small_gemm_low_bit",
        "_small_gemm_kernel",
        types,
        values,
        # Where sums take all registers, two numbers wait in memory until the loop over columns is done.
        {"num_warps": tiling.warps, "fast": True, "roomy": roomy},
    )


def row_low_bit(n: int, k: int, gated: bool = False, zeros: bool = False, dtype: str = BF16) -> tuple:
    tiling = choose_warps(n, k // 128, gated, zeros, 132)
    assert tiling is not None
    types = {
        **dict.fromkeys(("x", "bias", "out"), dtype), "words": "*i32", "scale": "*fp16",
        "offset": "*u8" if zeros else "*fp16",
    }  # fmt: skip
    values = {
        "N": n, "K": k, "GS": 128, "WARPS": tiling.warps, "TILES": tiling.tiles, "AHEAD": tiling.ahead,
        "GATE": int(gated), "ADD": not gated, "BIAS": False, "ZEROS": zeros, "ASM": 0, "DEPENDENT": True,
    }  # fmt: skip
    # With a bound on registers a few numbers wait in memory: for gates measured faster than fewer programs.
    options = {"num_warps": tiling.warps, "maxnreg": tiling.registers, "fast": tiling.registers is None}
    return "row_low_bit", "row_product", types, values, options


def few_rows_low_bit(rows: int, n: int, k: int, zeros: bool = False) -> tuple:
    """As on an H200."""
    tiling = low_bit_tiling(rows, n, k // 128, False, 132, hopper=True, plain=True)
    return low_bit(tiling, dependent=rows <= 16, roomy=True, N=n, K=k, OFFSET=2 if zeros else 0)


def experts_low_bit(bm: int, table: int = TABLE.value) -> tuple:
    types = {
        **dict.fromkeys(("x", "bias", "out"), BF16), **LOW_BIT, "scale": BF16,
        **dict.fromkeys(("columns", "order", "owners", "total"), "*i32"),
    }  # fmt: skip
    values = {
        "N": 2880, "K": 2880, "GS": 32, "BITS": 4, "TOP_K": 4, "BM": bm, "BN": 64, "STAGES": 3, "GATE": 3, "TABLE": table,
        "OFFSET": 0, "ORDER": False, "SPREAD": True, "BIAS": True, "BY_PAIR": bm == 16, "ASM": 0,
        "DEPENDENT": False,
    }  # fmt: skip
    return "experts_low_bit", "grouped_low_bit", types, values, {"num_warps": 4, "fast": True}


LATENT = {"C": 512, "C_PAD": 512}
LATENT_ROTARY = {"HALF": 32, "HALF_PAD": 32, "BLOCK_SIZE": 16}
LATENT_KEEP = {
    **dict.fromkeys(("q", "latent", "weight", "cache"), BF16), "eps": "fp32", "cos_sin": FP32, "positions": "*i64",
    "kv_index": "*i64", **words("q_token q_head latent_token c_block c_token"),
}  # fmt: skip


def latent(
    heads: int, prompts: bool, roomy: bool, dependent: bool = False, dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] | None = None,
) -> tuple:  # fmt: skip
    choice = choose_tiles(heads, dtype, capability or ((9, 0) if roomy else (8, 0)), prompts)
    group = min(heads, choice.columns)
    name = {torch.bfloat16: BF16, torch.float16: "*fp16", torch.float32: FP32}[dtype]
    types = {
        **dict.fromkeys(("q", "cache", "out"), name), "scale": "fp32", "tables": "*i32",
        **words("q_token q_head out_token c_block c_token table_stride"),
    }  # fmt: skip
    values = {
        **LATENT, "R": 64, "R_PAD": 64, "BLOCK_SIZE": 16, "BLOCK_N": choice.block, "STAGES": choice.stages,
        "HEADS": heads, "GROUP": group, "M": choice.columns,
    }  # fmt: skip
    if prompts:
        types |= {"tiles": "*i32", "first_token": "i32"}
        queries = choice.columns // group
        values |= {"QUERIES": queries, "TILE_WORDS": 5, "SUB": 128 // queries}
    else:
        types |= {**dict.fromkeys(("partial", "stats"), FP32), **dict.fromkeys(("table_rows", "seq_lens"), "*i32")}
        values |= {"SPLIT": True, "DEPENDENT": dependent}
    exact = dtype is torch.float32
    options = {"num_warps": choice.warps, "num_stages": choice.stages, "fast": not exact, "roomy": roomy}
    return "latent_attention", "latent_prefill" if prompts else "latent_decode", types, values, options


def in_flight(split: bool) -> tuple:
    types = {
        **dict.fromkeys(("q", "cache", "out"), BF16), **dict.fromkeys(("partial", "stats"), FP32), "scale": "fp32",
        **dict.fromkeys(("tables", "table_rows", "seq_lens"), "*i32"),
        **words("q_token q_head out_token c_block c_token table_stride"),
    }  # fmt: skip
    values = {"HEADS": 16, "M": 16, "C": 512, "R": 64, "BLOCK_SIZE": 16, "BLOCK_N": 64, "SPLIT": split}
    return "hopper_latent", "latent_decode_in_flight", types, values, {"num_warps": 8, "fast": True, "roomy": True}


def absorb(bm: int, bc: int, dependent: bool = False) -> tuple:
    types = {**LATENT_KEEP, "up": BF16, "out": BF16, **words("tokens up_head out_token")}
    values = {
        **LATENT, **LATENT_ROTARY, "HEADS": 16, "P": 128, "P_PAD": 128, "BM": bm, "BC": bc, "KEEP": True,
        "DEPENDENT": dependent,
    }  # fmt: skip
    return "latent_products", "absorb", types, values, {"num_warps": 4, "fast": True}


JOINED = {"MAX_SPLITS": 64, "HEADS": 16, "C_PAD": 512, "JOIN": 8, "BLOCK_N": 64}


def expand(kernel: str, **values: int) -> tuple:
    types = {"mixed": BF16, "up": BF16, "out": BF16, **words("tokens mixed_token up_head out_token")}
    if kernel != "expand":
        types |= {**dict.fromkeys(("partial", "stats"), FP32), "seq_lens": "*i32", **words("splits")}
    values = {"C": 512, "DEPENDENT": False, **values}
    return "latent_products", kernel, types, values, {"num_warps": 4, "num_stages": 3, "fast": True}


def latent_prompts(m: int, block: int, warps: int, roomy: bool) -> tuple:
    types = {
        **dict.fromkeys(("q", "keys", "latent", "out"), BF16), "tiles": "*i32", "scale": "fp32",
        **words("q_token q_head keys_token latent_token out_token"),
    }  # fmt: skip
    values = {
        "P": 128, "P_PAD": 128, "R": 64, "R_PAD": 64, "V": 128, "V_PAD": 128, "C": 512, "TILE_WORDS": 5, "SUB": 128 // m,
        "M": m, "BLOCK_N": block,
    }  # fmt: skip
    options = {"num_warps": warps, "num_stages": 2, "fast": True, "roomy": roomy}
    return "latent_prompts", "latent_prompts", types, values, options


FUSED = {"NORM": True, "GATE": 1, "ADD": False, "BIAS": False}
SLOTS = {"slots": "*i32", "out": "*i32", "last_tokens": "*i32", "lengths": "*i64"}
CASES = [
    decode(BF16),
    decode(BF16, block=32, warps=1, stages=4),
    decode(BF16, block=32, warps=1, stages=4, group=8),
    decode(BF16, FP8, block=32, warps=1, stages=4),
    decode(BF16, splits=16, dependent=True),
    decode(BF16, FP8, fast=False),
    decode(BF16, FP8, group=8, block=32, warps=1, stages=5, asm=True),
    decode(BF16, FP8, group=8, splits=2, warps=2, asm=True),
    decode(BF16, FP8, group=1, lanes=16),
    decode(BF16, FP8, group=1, lanes=4, block=32, warps=1),
    decode(BF16, FP8, group=1, lanes=16, splits=16, dependent=True),
    decode(BF16, group=1, lanes=8),
    decode("*fp16", d=80, splits=4, window=70, softcap=True),
    decode(BF16, group=1, alibi=True, fast=False),
    decode(BF16, FP8, group=1, lanes=16, alibi=True, fast=False),
    decode(BF16, d=64, group=8, splits=16, window=128, sinks=True, dependent=True),
    decode(BF16, FP8, group=1, lanes=16, sinks=True, chunk=8192, fast=False),
    decode(FP32, block=32, fast=False),
    prefill(BF16, 128, 64, 8, 2),
    prefill(BF16, 128, 128, 8, 2, prefix=False),
    prefill(BF16, 128, 64, 8, 2, own=False, window=100),
    gather(100),
    prefill(BF16, 128, 64, 8, 2, cache=FP8, fast=False),
    prefill(BF16, 64, 32, 4, 3, alibi=True, fast=False),
    prefill(BF16, 128, 32, 4, 3, d=64, sinks=True, chunk=8192),
    prefill(FP32, 32, 32, 4, 1, fast=False),
    prefill(BF16, 64, 32, 4, 2, d=256, fast=False),
    bulk(128, 64, 8, 3),
    bulk(128, 64, 8, 3, d=64, sinks=True, chunk=8192),
    specialised(128),
    specialised(64, window=100),
    bulk(128, 128, 8, 2),
    bulk(64, 64, 4, 3),
    norm(0),
    norm(1, dependent=True),
    norm(2),
    norm(3),
    norm(0, centred=True),
    norm(1, centred=True),
    sums(1, 8),
    sums(2, 3, form=3),
    sums(3, 2, 4096, norm=False, dtype="*i32"),
    gate(0),
    gate(0, 96, activation=2),
    gate(0, activation=3, gated=False),
    gate(1, activation=4, gated=False),
    gate(0, 4096, activation=5, gated=False),
    rotated(16, 40),
    rotated(20, 32),
    gate(1),
    gate(1, 11008),
    gate(1, 28672),
    gate(3),
    (
        "quantize", "_quantize_kernel",
        {"x": BF16, "data": FP8, **dict.fromkeys(("scales", "input_scale"), FP32), **words("x_row scales_row")},
        {"WIDTH": 14336, "BLOCK": 16384, "FORM": 1, "DEPENDENT": False}, {"num_warps": 16, "fast": True},
    ),
    gemv(4096, gemv_shape(4096)),
    grouped(choose_tiling(999, 8, True, "16 bits", roomy=False), 1),
    grouped(choose_tiling(8, 8, True, "16 bits"), 1),
    grouped(choose_tiling(999, 8, True, "16 bits"), 1),
    grouped(choose_tiling(8, 8, False, "fp8 by square"), 0, 3),
    grouped(Tiling(64, 128, 64, 8, 4, True, bulk=True), 1),
    grouped(replace(choose_tiling(8, 8, False, "fp8 by square"), bulk=True), 0, 3),
    pairs("pair_gate", 768, 2048),
    pairs("pair_down", 2048, 768),
    pairs("pair_down", 2048, 1408, 1),
    pairs("pair_down", 4096, 14336),
    (
        "grouped_products", "sort_pairs", {**dict.fromkeys(("ids", "order", "owners", "total"), "*i32"), "pairs": "i32"},
        {"E": 128, "BINS": 256, "BM": 16, "BLOCK": 512, "DEPENDENT": False}, {"num_warps": 2, "fast": True},
    ),
    (
        "grouped_products", "sum_pairs", {"pairs": BF16, "weights": FP32, "out": BF16},
        {"WIDTH": 2048, "TOP_K": 8, "BLOCK": 1024, "WEIGHTED": True, "ADD": False, "DEPENDENT": False}, {"fast": True},
    ),
    routing(64, 1, 6, 0),
    routing(256, 8, 8, 1),
    latent(16, prompts=False, roomy=False),
    latent(16, prompts=False, roomy=True, dependent=True),
    latent(16, prompts=True, roomy=False),
    latent(16, prompts=True, roomy=True),
    in_flight(True),
    absorb(16, 64),
    expand("expand", V=128, BM=32, BV=64, BK=64),
    expand("join_and_expand", V=128, **JOINED, BV=32),
    expand("join", **JOINED),
    (
        "latent_products", "rotate_and_keep", LATENT_KEEP, {**LATENT, **LATENT_ROTARY, "HEADS": 16, "HB": 16, "P": 128},
        {"num_warps": 4, "fast": True},
    ),
    latent_prompts(64, 32, 4, roomy=False),
    latent_prompts(128, 64, 8, roomy=True),
    gemv_fp8(4096, gemv_fp8_shape(4096, 4096)),
    gemv_fp8(8192, gemv_fp8_shape(8192, 8192)),
    gemv_fp8(11008, gemv_fp8_shape(4096, 11008)),
    gemv_fp8(28672, gemv_fp8_shape(8192, 28672)),
    gemv_fp8(27648, gemv_fp8_shape(5120, 27648)),
    gemv_fp8(27648, gemv_fp8_shape(5120, 27648, roomy=False)),
    low_bit(low_bit_tiling(16, 4096, 32, False, 132)),
    low_bit(low_bit_tiling(1, 4096, 32, False, 132), one=True, dependent=True),
    low_bit(low_bit_tiling(1, 4096, 32, False, 132), one=True, IN_PAIRS=True, GATE=0),
    low_bit(low_bit_tiling(8, 4096, 32, True, 132), OFFSET=1),
    low_bit(low_bit_tiling(16, 4096, 32, True, 132), OFFSET=1),
    low_bit(low_bit_tiling(1, 4096, 32, False, 132), one=True, IN_PAIRS=True, OFFSET=2),
    low_bit(low_bit_tiling(64, 4096, 32, False, 132, hopper=True), OFFSET=2, roomy=True),
    low_bit(low_bit_tiling(32, 4096, 64, True, 132), BITS=8, GS=4096, OFFSET=1),
    low_bit(low_bit_tiling(64, 4096, 32, False, 132, hopper=True), GS=32, SPREAD=True, TABLE=TABLE.value),
    low_bit(low_bit_tiling(1, 4096, 32, False, 132), one=True, IN_PAIRS=True, GS=64, SPREAD=True, TABLE=TABLE.value),
    low_bit(low_bit_tiling(64, 4096, 32, False, 132, hopper=True), GS=32, SPREAD=True, TABLE=FLOATS.value),
    low_bit(low_bit_tiling(128, 4096, 32, False, 132, hopper=True), roomy=True),
    low_bit(low_bit_tiling(256, 28672, 32, False, 132, hopper=True), roomy=True, SPREAD=True),
    few_rows_low_bit(64, 28672, 4096),
    few_rows_low_bit(64, 28672, 4096, zeros=True),
    few_rows_low_bit(32, 28672, 4096),
    few_rows_low_bit(32, 4096, 14336, zeros=True),
    few_rows_low_bit(32, 6144, 4096),
    few_rows_low_bit(16, 28672, 4096),
    few_rows_low_bit(16, 4096, 14336, zeros=True),
    row_low_bit(6144, 4096),
    row_low_bit(4096, 4096),
    row_low_bit(14336, 4096, gated=True),
    row_low_bit(14336, 4096, gated=True, dtype="*fp16"),
    row_low_bit(4096, 14336),
    row_low_bit(6144, 4096, zeros=True),
    row_low_bit(4096, 4096, zeros=True),
    row_low_bit(14336, 4096, gated=True, zeros=True, dtype="*fp16"),
    row_low_bit(4096, 14336, zeros=True),
    row_low_bit(8192, 28672),
    experts_low_bit(16),
    experts_low_bit(16, FLOATS.value),
    experts_low_bit(64, FLOATS.value),
    (
        "low_bit_linear", "_widen_kernel", {**LOW_BIT, "out": BF16},
        {"N": 4096, "K": 4096, "GS": 128, "BITS": 4, "BN": 64, "TABLE": False, "OFFSET": True}, {"fast": True},
    ),
    (
        "low_bit_linear", "_to_int8_kernel",
        {"x": BF16, "data": "*i8", "scales": FP32, "input_scale": FP32, **words("x_row")},
        {"WIDTH": 14336, "BLOCK": 16384, "STATIC": False, "DEPENDENT": False}, {"num_warps": 16, "fast": True},
    ),
    few_rows(SmallGemmTiling(64, 256, 4, 4), 16, "*i8"),
    few_rows(few_rows_tiling(64, 8192, 4096, 132), 64, k=4096),
    *(
        few_rows(tiling, most, n=n, k=k)
        for (n, k), measured in TILINGS.items()
        for most, tiling in measured
    ),
    (
        "gemv_fp8", "_sum_parts_kernel", {"parts": FP32, **dict.fromkeys(("bias", "out"), BF16)},
        {"N": 8192, "PARTS": 7, "BLOCK": 128, "ADD": True, "BIAS": False, "DEPENDENT": True}, {"num_warps": 2, "fast": True},
    ),
    rotary(64),
    rotary(40),
    rotary(64, FP8),
    rotary(40, FP8, scaled=True),
    rotary(64, FP8, scaled=True, hb=heads_at_once(64, True, False)),
    rotary(64, norm=1),
    rotary(40, FP8, scaled=True, norm=1, weight=FP32),
    rotary(64, norm=2, weight=FP32, hb=32),
    (
        "choice", "_best_of_part_kernel",
        {
            "logits": BF16, "parts": "*fp32", "slots": "*i32", "filters": "*fp32",
            **words("logits_row filters_row vocab start num_parts"),
        },
        {"PART": 4096}, {},
    ),
    (
        "choice", "_join_parts_kernel",
        {"parts": "*fp32", "filters": "*fp32", **SLOTS, **words("out_row last_row filters_row record num_parts")},
        {"PAD": 32}, {"num_warps": 1},
    ),
    *(
        (
            "adjust", f"{name}_kernel",
            {
                **dict.fromkeys(["rows", "penalised", "slots", "pages", "page_tables", "tables"], "*i32"), "lengths": "*i64",
                "prompts": "*i64", "penalties": FP32, "scores": FP32, **words("tables_row record penalties_row vocab start"),
            },
            {"HISTORY": 1024, "BLOCK_SIZE": 16, "SHARED": True}, {},
        )
        for name in ("tally", "penalise")
    ),
    ("state", "_write_kernel", {"words": "*i32", "staged": "*i32"}, {"BLOCK": 512}, {}),
    *(
        (
            "state", "_inputs_kernel",
            {
                **dict.fromkeys(
                    ("slots", "at", "last_tokens", "shifts", "tables", "page_tables", "pages", "seq_lens"), "*i32"
                ),
                **dict.fromkeys(("lengths", "input_ids", "positions", "kv_index"), "*i64"),
                **words("count last_row tables_row record"),
            },
            {"BLOCK_SIZE": 16, "LAST": last, "OWN_PAGES": own_pages, "BLOCK": 128}, {},
        )
        for last, own_pages in ((True, False), (False, False), (True, True), (False, True))
    ),
]  # fmt: skip
MORE = [
    in_flight(False),
    latent(16, prompts=False, roomy=True),
    latent(128, prompts=False, roomy=True),
    absorb(64, 128),
    absorb(16, 64, dependent=True),
    expand("expand", V=128, BM=64, BV=128, BK=64),
    expand("expand", V=128, BM=16, BV=32, BK=64),
]


def chosen_for(capability: int, every: bool) -> list[tuple]:
    """Unless every case is wanted, none of those that compile longest, and for older GPUs one of each kernel and type."""
    chosen, seen = [], set()
    for case in CASES + MORE if every else CASES:
        _, kernel, types, values, options = case
        # These came later than the oldest GPUs that the rest runs on.
        later = (
            FP8 in types.values()
            or values.get("DEPENDENT", False)
            or kernel in ("prefill_in_bulk", "prefill_warp_specialised")
            or options.get("roomy", False)
            or values.get("BULK", False)
        )
        kind = (kernel, types.get("q"))
        slow = kernel == "prefill" and (FP32 in types.values() or values["D"] > 128)
        slow |= capability >= 90 and options.get("roomy") is False  # there are roomy ones
        if (capability < 90 and later) or (not every and (slow or (capability < 90 and kind in seen))):
            continue
        seen.add(kind)
        if "ASM" in values:
            case = (*case[:3], values | {"ASM": capability // 10}, options)
        chosen.append(case)
    return chosen


def chosen_prefill(d: int, **more: bool) -> tuple:
    choice = choose_prefill(d, torch.float16, **more)
    return prefill("*fp16", choice.queries, choice.block, choice.warps, choice.stages, d=d, prefix=more["prefix"])


def old_decode(d: int) -> tuple:
    choice = choose_decode(1, 8, 4, d, torch.float32, torch.float32, 40, async_copies=False)
    return decode(FP32, d=d, splits=choice.splits, block=choice.block, stages=choice.stages, fast=False)


# By the choices for GPUs that have another amount of shared memory, or other tensor cores that take more of it.
ELSEWHERE = [
    (75, chosen_prefill(128, prefix=True, async_copies=False)),
    (75, old_decode(256)),
    *((75, latent(16, prompts, False, dtype=torch.float16, capability=(7, 5))) for prompts in (False, True)),
    *((86, latent(16, prompts, False, dtype=torch.float32)) for prompts in (False, True)),
    *((100, latent(128, prompts, False, capability=(10, 0))) for prompts in (False, True)),
]


@pytest.mark.timeout(1200)  # a hundred kernels
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int, tmp_path: Path, device_name: str) -> None:
    compile_all([(capability, case) for case in chosen_for(capability, device_name != "cpu")], tmp_path)


@pytest.mark.timeout(600)
def test_kernels_fit_into_other_gpus(tmp_path: Path) -> None:
    compile_all(ELSEWHERE, tmp_path)


def compile_all(asked: list[tuple[int, tuple]], tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(asked),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
    assert len(done.stdout.splitlines()) == len(asked)
