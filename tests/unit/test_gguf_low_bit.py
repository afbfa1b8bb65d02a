"""Blocks of GGUF files as matrices in few bits: their values are those of the `gguf` package."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from gguf_blocks import random_blocks
from text_generation_inference.kernels import low_bit
from text_generation_inference.quant.gguf_low_bit import FORMS, common_scheme

ROWS, COLUMNS = 6, 512


def blocks_and_values(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = random_blocks(kind.upper(), ROWS, COLUMNS, seed=3)
    values = dequantize(blocks, GGMLQuantizationType[kind.upper()])
    return torch.from_numpy(blocks), torch.from_numpy(np.array(values))


@pytest.mark.parametrize("kind", FORMS)
def test_values(kind: str) -> None:
    blocks, values = blocks_and_values(kind)
    form = FORMS[kind]
    for bits in {form.scheme.bits, 8}:
        weight = form.read(kind, blocks, bits)
        assert torch.equal(low_bit.dequantize(weight), values)
        assert weight.shape == (ROWS, COLUMNS) and weight.bits == bits
    held = form.read(kind, blocks, form.scheme.bits)
    tensors = (held.codes, held.scale, *(() if held.offset is None else (held.offset,)))
    assert sum(tensor.nbytes for tensor in tensors) == form.scheme.bytes(ROWS, COLUMNS)
    assert (held.scale.dtype, held.group_size) == (form.scheme.scale_dtype, form.scheme.group_size)


def test_offsets_far_above_scales() -> None:
    """Values are then as good as the offset's last bit; in 8 bits they are the same."""
    rows = torch.zeros((4, 18 + 2), dtype=torch.uint8)
    rows[:, 4:] = torch.arange(16, dtype=torch.uint8) * 17
    rows[:, :2] = torch.tensor([2e-7], dtype=torch.float16).view(torch.uint8)
    rows[:, 2:4] = torch.tensor([-60000.0], dtype=torch.float16).view(torch.uint8)
    values = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType.Q4_1))
    form = FORMS["q4_1"]
    assert torch.equal(low_bit.dequantize(form.read("q4_1", rows, 8)), values)
    torch.testing.assert_close(low_bit.dequantize(form.read("q4_1", rows, 4)), values, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    "mix", [("q4_k", "q6_k"), ("q4_0", "q4_k"), ("iq4_nl", "iq4_xs"), ("mxfp4", "q8_0"), ("q5_1",)]
)
def test_parts_of_several_types_are_one_matrix(mix: tuple[str, ...]) -> None:
    scheme = common_scheme(set(mix))
    read = [blocks_and_values(kind) for kind in mix]
    weights = [FORMS[kind].read(kind, blocks, scheme.bits) for kind, (blocks, _) in zip(mix, read, strict=True)]
    assert low_bit.can_join(weights)
    joined = low_bit.join(weights)
    assert torch.equal(low_bit.dequantize(joined), torch.cat([values for _, values in read]))
    assert (joined.bits, joined.group_size) == (scheme.bits, scheme.group_size)
    assert (joined.offset is None) == scheme.is_symmetric and joined.scale.dtype is scheme.scale_dtype
