"""Numbers of several kinds as one tensor."""

import torch

from text_generation_inference.kernels.packed import pack, unpack


def test_what_is_packed_is_unpacked_bit_for_bit() -> None:
    given = {
        "ids": torch.tensor([[1, 2**31 - 1], [-1, 0]]),
        "places": torch.tensor([7], dtype=torch.int32),
        "numbers": torch.tensor([0.1, -0.0, torch.inf, 1e-42, 2.0**24]),
        "flags": torch.tensor([True, False]),
        "none": torch.zeros((0, 3), dtype=torch.int32),
    }
    words, layout = pack(given)
    assert words.dtype is torch.int32 and len(words) == 4 + 1 + 5 + 2
    found = unpack(words, layout)
    for name, tensor in given.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        assert found[name].tolist() == tensor.tolist()
    assert str(found["numbers"][1].item()) == "-0.0"
    assert hash(layout) == hash(pack(given)[1])
