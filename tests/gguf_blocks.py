"""Rows of quantised blocks of any type, for tests: the `gguf` package dequantises all types but quantises only some."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# Where the float16 factors of a block are; everything else may be any bits.
_FACTORS = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "IQ4_XS": [0]}
_FACTORS |= {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
# What a factor is multiplied by.
_SCALED_BY = {"IQ4_XS": 32, "Q2_K": 15, "Q3_K": 32, "Q4_K": 63, "Q5_K": 63, "Q6_K": 128}
_LARGEST = {"Q8_0": 128, "IQ4_NL": 127, "IQ4_XS": 127, "Q5_0": 16, "Q5_1": 31, "Q5_K": 31, "Q6_K": 32}
_LARGEST |= {"Q2_K": 3, "Q3_K": 4}


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, largest: float = 2.0) -> np.ndarray:
    """uint8 `[rows, bytes]`, whose values are about as large as that."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = random.integers(120, 126, blocks.shape[:2])
    for place in _FACTORS.get(kind, ()):
        factor = random.uniform(0.5, 1.5, blocks.shape[:2]) / _SCALED_BY.get(kind, 1) / _LARGEST.get(kind, 15) * largest
        factor *= random.choice([-1.0, 1.0], blocks.shape[:2]) if place == _FACTORS[kind][0] else 1.0
        blocks[..., place : place + 2] = factor.astype("<f2").view(np.uint8).reshape(*factor.shape, 2)
    return blocks.reshape(rows, -1)
