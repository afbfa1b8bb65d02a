"""Every kernel compiles for real GPUs, without one: the interpreter is more lenient than the compiler.

In a process of its own, because Triton decides between the two when it is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

STRIDES = "q_token q_head out_token k_block k_token k_head v_block v_token v_head table_stride"
CACHE_STRIDES = "q_token q_head k_token k_head v_token v_head ck_block ck_token ck_head cv_block cv_token cv_head"


def words(text: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), "i32")


def decode(dtype: str, d: int = 128, splits: int = 1, window: int = 0, softcap: bool = False, block: int = 64) -> tuple:
    types = {
        **dict.fromkeys(("q", "k_cache", "v_cache", "out"), dtype),
        **dict.fromkeys(("partial", "stats"), "*fp32"),
        **dict.fromkeys(("counters", "tables", "table_rows", "seq_lens"), "*i32"),
        **{"scale": "fp32", "softcap": "fp32"},
        **words(STRIDES),
    }
    padded = 1 << (d - 1).bit_length()
    values = {
        "KV_HEADS": 8, "GROUP": 4, "M": 16, "D": d, "D_PAD": padded, "BLOCK_SIZE": 16, "BLOCK_N": block,
        "SPLITS": splits, "WINDOW": window, "SOFTCAP": softcap, "PRECISION": "ieee",
    }  # fmt: skip
    return "attention", "_decode_kernel", types, values, {"num_warps": 4, "num_stages": 3}


def prefill(dtype: str, m: int, block: int, warps: int, stages: int, d: int = 128) -> tuple:
    types = {
        **dict.fromkeys(("q", "k_cache", "v_cache", "out"), dtype),
        **dict.fromkeys(("tables", "tiles"), "*i32"),
        **{"scale": "fp32", "softcap": "fp32"},
        **words(STRIDES),
    }
    values = {
        "GROUP": 4, "SUB": 128 // m, "M": m, "D": d, "D_PAD": d, "BLOCK_SIZE": 16, "BLOCK_N": block, "WINDOW": 0,
        "SOFTCAP": False, "PRECISION": "ieee",
    }  # fmt: skip
    return "attention", "_prefill_kernel", types, values, {"num_warps": warps, "num_stages": stages}


BF16 = "*bf16"
SLOTS = {"slots": "*i32", "out": "*i32", "tokens": "*i32", "lengths": "*i64"}
CASES = [
    decode(BF16),
    decode(BF16, splits=16),
    decode("*fp16", d=80, splits=4, window=70, softcap=True),
    decode("*fp32", block=32),
    prefill(BF16, 128, 64, 8, 3),
    prefill("*fp32", 32, 32, 4, 1),
    prefill(BF16, 64, 32, 4, 2, d=256),
    (
        "small", "_norm_kernel",
        {**dict.fromkeys(("x", "residual", "weight", "out", "total"), BF16), "eps": "fp32", **words("x_row residual_row")},
        {"WIDTH": 4096, "PAD": 4096, "ADD": True}, {"num_warps": 8},
    ),
    ("small", "_gate_kernel", {"x": BF16, "out": BF16, "x_row": "i32"}, {"WIDTH": 14336, "BLOCK": 2048, "GELU": False}, {}),
    ("small", "_gate_kernel", {"x": BF16, "out": BF16, "x_row": "i32"}, {"WIDTH": 96, "BLOCK": 128, "GELU": True}, {}),
    *(
        (
            "small", "_rotary_kernel",
            {
                **dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), BF16), "cos_sin": "*fp32",
                **dict.fromkeys(("positions", "kv_index"), "*i64"), **words(CACHE_STRIDES),
            },
            {
                "BLOCK_SIZE": 16, "HEADS": 32, "KV_HEADS": 8, "D": 128, "D_PAD": 128, "HALF": half, "HALF_PAD": 64,
                "HB": 16,
            },
            {},
        )
        for half in (64, 40)
    ),
    (
        "choice", "_best_of_part_kernel", {"logits": BF16, "parts": "*fp32", **words("logits_row vocab num_parts")},
        {"PART": 4096}, {},
    ),
    (
        "choice", "_join_parts_kernel",
        {"parts": "*fp32", **SLOTS, **words("out_row tokens_row record num_parts")}, {"PAD": 32}, {"num_warps": 1},
    ),
    (
        "choice", "_choose_kernel",
        {
            "logits": BF16, **SLOTS, "seeds": "*i64", "filters": "*fp32",
            **words("logits_row out_row tokens_row record filters_row vocab"),
        },
        {"BLOCK": 2048}, {"num_warps": 8},
    ),
    ("state", "_write_kernel", {"words": "*i32", "staged": "*i32"}, {"BLOCK": 512}, {}),
    *(
        (
            "state", "_inputs_kernel",
            {
                **dict.fromkeys(("slots", "at", "tokens", "tables", "seq_lens"), "*i32"),
                **dict.fromkeys(("lengths", "input_ids", "positions", "kv_index"), "*i64"),
                **words("count tokens_row tables_row record"),
            },
            {"BLOCK_SIZE": 16, "LAST": last, "BLOCK": 128}, {},
        )
        for last in (True, False)
    ),
]  # fmt: skip

PROGRAM = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for capability, (module, name, types, values, options) in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(f"tgi.kernels.triton.{module}"), name)
    signature = {parameter.name: types.get(parameter.name, "constexpr") for parameter in kernel.params}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(capability, name, compiled.metadata.shared, flush=True)
    assert compiled.metadata.shared <= 99 * 1024, "no room in the shared memory of smaller GPUs"
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    asked = json.dumps([(capability, case) for case in CASES])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=asked, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(CASES)
