"""Any slice of a matrix in integers, of any bits, shape and packing, is that slice of the whole."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_words import pack_words
from safetensors.torch import save_file
from torch import Tensor

from text_generation_inference.kernels import low_bit
from text_generation_inference.quant.integers import Integers, StoredIntegers
from text_generation_inference.weights.checkpoint import Checkpoint
from text_generation_inference.weights.declare import Part


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Integers, dict[str, Tensor], Tensor]:
    """What is stored, its tensors, and its values."""
    strategy = draw(st.sampled_from(("tensor", "channel", "group")))
    size = draw(st.sampled_from((8, 16, 32, 48))) if strategy == "group" else None
    stored = Integers(
        bits=draw(st.integers(1, 8)),
        is_packed=draw(st.booleans()),
        strategy=strategy,
        group_size=size,
        is_symmetric=draw(st.booleans()),
        has_group_index=size is not None and draw(st.booleans()),
    )
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 120))
    groups = -(-columns // size) if size else 1
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count, half = 1 << stored.bits, 1 << (stored.bits - 1)
    codes = torch.randint(0, count, (rows, columns), generator=random)
    index = torch.arange(columns) // (size or columns)
    if stored.has_group_index:
        index = index[torch.randperm(columns, generator=random)]
    by = (1, 1) if strategy == "tensor" else (rows, groups)
    scale = torch.rand(by, generator=random).half() + 0.1
    zero = torch.randint(0, count, by, generator=random)
    values = (codes - (half if stored.is_symmetric else zero.expand(rows, -1)[:, index])) * scale.float().expand(
        rows, -1
    )[:, index]
    # Of a few codes both ways take as many words, and nobody could tell them apart.
    differ = all(-(-size * stored.bits // 32) != -(-size // (32 // stored.bits)) for size in (rows, columns))
    is_dense = draw(st.booleans()) if differ else True
    tensors = {"m.weight_scale": scale[0] if strategy == "tensor" else scale}
    if stored.is_packed:
        tensors["m.weight_packed"] = pack_words(codes, stored.bits, is_dense)
        tensors["m.weight_shape"] = torch.tensor([rows, columns])
    else:
        tensors["m.weight"] = (codes - half).to(torch.int8)
    if not stored.is_symmetric:
        is_word = stored.is_packed and strategy != "tensor"
        plain = (zero[0] if strategy == "tensor" else zero) - half
        tensors["m.weight_zero_point"] = (
            pack_words(zero.t(), stored.bits, is_dense).t().contiguous() if is_word else plain.to(torch.int8)
        )
    if stored.has_group_index:
        tensors["m.weight_g_idx"] = index.int()
    return stored, tensors, values


@given(matrices(), st.data())
def test_slices(tmp_path_factory, made: tuple[Integers, dict[str, Tensor], Tensor], data: st.DataObject) -> None:
    stored, tensors, values = made
    folder: Path = tmp_path_factory.mktemp("matrix")
    save_file(tensors, folder / "model.safetensors")
    checkpoint, method = Checkpoint.open(folder), StoredIntegers(stored)
    part = Part("m.weight", tuple(values.shape))
    shapes = {name: beside.shapes for name, beside in method.declare(part).items()}
    assert all(tuple(tensors[name].shape) in shapes[name] for name in tensors)
    dim = data.draw(st.sampled_from((None, 0, 1)))
    if dim is not None:
        start = data.draw(st.integers(0, values.shape[dim] - 1))
        end = data.draw(st.integers(start + 1, values.shape[dim]))
        part = Part("m.weight", tuple(values.shape), dim, start, end)
        values = values.narrow(dim, start, end - start)
    asked = {wanted.name for wanted in method.list_reads([("m.weight", part)], checkpoint)}
    assert asked <= tensors.keys()
    weight = method.read_part("m.weight", part, checkpoint, torch.device("cpu"))
    assert weight.shape == values.shape and weight.bits == (4 if stored.bits <= 4 and values.shape[1] % 2 == 0 else 8)
    assert torch.equal(low_bit.dequantize(weight), values)
