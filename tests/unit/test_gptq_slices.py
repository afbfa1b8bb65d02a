"""Any slice of a matrix in GPTQ or AWQ, of any bits, shape and order of inputs, is that slice of the whole."""

from pathlib import Path

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_words import pack_words
from safetensors.torch import save_file
from torch import Tensor

from text_generation_inference.kernels import low_bit
from text_generation_inference.quant.awq import Awq, StoredAwq
from text_generation_inference.quant.gptq import Gptq, Stored
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.declare import Part

AWQ_PLACES = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}


def pack(codes: Tensor, bits: int) -> Tensor:
    """32 codes of 3 bits are three words, of which none is left out."""
    return pack_words(F.pad(codes, (0, -codes.shape[1] % 32 if bits == 3 else 0)), bits, is_dense=True)


def pack_awq(codes: Tensor, bits: int) -> Tensor:
    places = torch.tensor(AWQ_PLACES[bits])
    apart = codes.unflatten(1, (-1, len(places)))
    return pack(apart[..., places.argsort()].flatten(1), bits)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Gptq | Awq, dict[str, Tensor], Tensor]:
    """How it is stored, its tensors, and its values."""
    is_awq = draw(st.booleans())
    bits = draw(st.sampled_from((4, 8) if is_awq else (2, 3, 4, 8)))
    rows = draw(st.integers(1, 5)) * len(AWQ_PLACES[bits]) if is_awq else draw(st.integers(1, 40))
    columns, size = draw(st.integers(1, 130)), draw(st.sampled_from((None, 7, 8, 16, 32, 48, 128)))
    groups = 1 if size is None else -(-columns // size)
    torch.manual_seed(draw(st.integers(0, 2**31)))
    codes = torch.randint(0, 1 << bits, (rows, columns))
    scale = (torch.rand(groups, rows) + 0.1).to(draw(st.sampled_from((torch.float16, torch.bfloat16, torch.float32))))
    is_symmetric, less = draw(st.booleans()), draw(st.integers(0, 1))
    zero = torch.randint(1, 1 << bits, (groups, rows))
    index = torch.arange(columns) // (size or columns)
    tensors = {"m.scales": scale}
    if is_awq:
        method = Awq(StoredAwq(bits, size, has_zeros=not is_symmetric))
        tensors["m.qweight"] = pack_awq(codes.t(), bits)
        if not is_symmetric:
            tensors["m.qzeros"] = pack_awq(zero, bits)
    else:
        is_listed = size is not None and draw(st.booleans())
        method = Gptq(Stored(bits, size, is_symmetric, is_listed, zero_less=less))
        tensors |= {"m.qweight": pack(codes, bits).t().contiguous(), "m.qzeros": pack(zero - less, bits)}
        if is_listed:  # some groups may have no inputs, others many
            listed = torch.randint(0, groups, (columns,)) if draw(st.booleans()) else index[torch.randperm(columns)]
            tensors["m.g_idx"] = listed.int()
            index = listed if listed.any() else index
    if is_symmetric:
        zero = torch.full_like(zero, 1 << (bits - 1))
    return method, tensors, (codes - zero.t()[:, index]) * scale.t().float()[:, index]


@given(matrices(), st.data())
@settings(deadline=None)
def test_slices(tmp_path_factory, made: tuple[Gptq | Awq, dict[str, Tensor], Tensor], data: st.DataObject) -> None:
    method, tensors, values = made
    folder: Path = tmp_path_factory.mktemp("matrix")
    save_file(tensors, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    dim, is_turned = data.draw(st.sampled_from((None, 0, 1))), data.draw(st.booleans())
    shape, start, end = tuple(values.shape), 0, 0
    if dim is not None:
        start = data.draw(st.integers(0, shape[dim] - 1))
        end = data.draw(st.integers(start + 1, shape[dim]))
        values = values.narrow(dim, start, end - start)
        dim = 1 - dim if is_turned else dim
    part = Part("m.weight", shape[::-1] if is_turned else shape, dim, start, end, transposed=is_turned)
    holder, its_shape = method.holder(part)
    shapes = {holder: (its_shape,), **{name: beside.shapes for name, beside in method.declare(part).items()}}
    assert all(tuple(tensors[name].shape) in shapes[name] for name in tensors)
    assert {wanted.name for wanted in method.list_reads([("m.weight", part)], checkpoint)} <= tensors.keys()
    weight = method.read_part("m.weight", part, checkpoint, torch.device("cpu"))
    assert weight.scale.shape[1] == -(-weight.columns // weight.group_size)
    torch.testing.assert_close(low_bit.dequantize(weight), values, rtol=1e-5, atol=1e-4)
