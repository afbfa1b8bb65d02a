"""In which tiles the products of experts are computed: measured for known sizes, by a rule for others.

`python bench/cuda_experts.py --tune` prints lines of `TILES` for the GPU that it runs on.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of pairs sorted by expert."""

    bm: int  # pairs
    bn: int  # rows of a matrix; with a gate twice as many
    bk: int
    warps: int
    stages: int
    swap: bool  # the matrix is the left operand
    group: int = 16  # blocks of pairs whose programs run side by side
    bulk: bool = False  # tiles of matrices are brought by the copy engine of capability 9.0 and later


# By experts, hidden size, width and the form of the matrices: up to so many tokens, tiles of both products. Measured on
# an H200; used on GPUs with as much shared memory.
TILES: dict[tuple[int, int, int, str], tuple[tuple[int, Tiling, Tiling], ...]] = {
    (128, 2048, 768, "16 bits"): (  # Qwen3-30B-A3B
        (8, Tiling(16, 64, 128, 4, 4, True), Tiling(16, 256, 64, 8, 3, False)),
        (16, Tiling(32, 128, 128, 8, 3, True), Tiling(32, 256, 128, 8, 2, False)),
        (64, Tiling(16, 128, 128, 8, 3, True), Tiling(16, 256, 64, 8, 3, True)),
        (128, Tiling(16, 64, 128, 4, 3, True), Tiling(16, 128, 128, 8, 3, True)),
        (256, Tiling(32, 128, 128, 8, 3, True), Tiling(32, 256, 128, 8, 2, False)),
        (1024, Tiling(64, 256, 64, 8, 3, False), Tiling(64, 256, 64, 8, 3, False)),
    ),
    (8, 4096, 14336, "16 bits"): (  # Mixtral-8x7B
        (8, Tiling(16, 128, 128, 8, 3, True), Tiling(16, 128, 128, 8, 3, True)),
        (16, Tiling(16, 128, 128, 8, 3, True), Tiling(16, 128, 128, 8, 3, True, bulk=True)),
        (64, Tiling(32, 128, 128, 8, 3, True, bulk=True), Tiling(32, 128, 128, 8, 3, True, bulk=True)),
        (128, Tiling(32, 128, 128, 8, 3, True), Tiling(32, 256, 64, 8, 3, True, bulk=True)),
        (256, Tiling(64, 128, 64, 8, 4, True, bulk=True), Tiling(64, 128, 64, 8, 4, True, bulk=True)),
        (1024, Tiling(128, 128, 64, 8, 4, False, bulk=True), Tiling(128, 256, 64, 8, 3, False, bulk=True)),
    ),
    (64, 2048, 1408, "16 bits"): (  # DeepSeek-V2-Lite
        (8, Tiling(32, 128, 128, 8, 3, True), Tiling(32, 256, 64, 8, 3, True)),
        (16, Tiling(16, 64, 128, 4, 4, True), Tiling(16, 128, 64, 8, 4, True)),
        (64, Tiling(16, 64, 128, 4, 3, True), Tiling(16, 256, 128, 8, 2, False)),
        (128, Tiling(16, 128, 128, 4, 2, False), Tiling(16, 128, 128, 4, 2, True)),
        (256, Tiling(32, 128, 128, 4, 2, False), Tiling(32, 256, 64, 8, 3, True)),
        (1024, Tiling(128, 128, 64, 8, 4, False), Tiling(128, 256, 64, 8, 3, False)),
    ),
}


def choose_tiles(
    tokens: int, top_k: int, num_experts: int, hidden: int, width: int, form: str, roomy: bool = True
) -> tuple[Tiling, Tiling]:
    """Of gate and up projections, and of down projections; `form` is a word of `FORMS`.

    `roomy`: a GPU with as much shared memory as data centres have.
    """
    for most, first, second in TILES.get((num_experts, hidden, width, form), ()) if roomy else ():
        if tokens <= most:
            return first, second
    pairs = tokens * top_k
    first, second = (choose_tiling(pairs, num_experts, gated, form, roomy) for gated in (True, False))
    return first, second


FORMS = {"float32": 4, "16 bits": 2, "fp8": 1, "fp8 by square": 1}  # bytes of a value


def find_form(dtype: torch.dtype, by_square: bool) -> str:
    names = {size: name for name, size in reversed(FORMS.items())}
    return "fp8 by square" if by_square else names[dtype.itemsize]


def choose_tiling(pairs: int, num_experts: int, gated: bool, form: str, roomy: bool = True) -> Tiling:
    """By the pairs that an expert gets on average; both products of a mixture have the same `bm`."""
    each = pairs / num_experts
    bm = 16 if each <= 8 else 32 if each <= 24 else 64 if each <= 48 or not roomy else 128
    small = FORMS[form] == 1
    if form == "float32":
        return Tiling(bm, 32, 32, 4, 2, False)
    if not roomy:
        return Tiling(bm, 64, 128 if small else 64, 4, 2, False)
    if bm <= 32:
        return Tiling(bm, 64, 128, 4, 3 if gated else 4, True)
    if bm == 64:
        return Tiling(bm, 64 if gated else 128, 128 if small else 64, 4, 3, False)
    if small:
        return Tiling(bm, 64 if gated and form == "fp8 by square" else 128, 128, 8, 3, False)
    return Tiling(bm, 128 if gated else 256, 64, 8, 3, False)
