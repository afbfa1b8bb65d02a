"""Loading through memory of its own: what stays is copied out of it."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from text_generation_inference.kernels.fp8 import Fp8Weight, quantize_weight
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.quant.choose import assign_methods, choose_quantization
from text_generation_inference.quant.method import Matrix
from text_generation_inference.weights.declare import Declared, Module, Part
from text_generation_inference.weights.load import load_dummy
from text_generation_inference.weights.scratch import Scratch


class Watch(TorchFunctionMode):
    """Notes where every tensor was made."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.made_inside: set[int] = set()  # storages
        self.kept: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and self.inside:
            self.kept.append(result)
            self.made_inside.add(result.untyped_storage().data_ptr())
        return result

    @contextmanager
    def pool(self) -> Generator[None, None, None]:
        assert not self.inside
        self.inside = True
        yield
        self.inside = False


class Layer(Module):
    def __init__(self) -> None:
        self.joined = Matrix(Ops(), [Part("q.weight", (32, 16)), Part("k.weight", (16, 16))])
        self.single = Matrix(Ops(), [Part("o.weight", (16, 16))])
        self.norm: torch.Tensor

    def declare(self) -> list[Declared]:
        return [Declared("norm", [Part("norm.weight", (16,))])]


def load(scratch: Scratch, method: str | None) -> Layer:
    layer = Layer()
    assign_methods(layer, choose_quantization(method, None))
    load_dummy(layer, torch.bfloat16, torch.device("cpu"), 1, scratch)
    return layer


def tensors_of(layer: Layer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (layer.joined.weight, layer.single.weight, layer.norm):
        found += [value.data, value.scale] if isinstance(value, Fp8Weight) else [value]
    return found


def test_nothing_that_stays_is_in_the_pool() -> None:
    for method in (None, "fp8"):
        watch = Watch()
        with watch:
            layer = load(Scratch(watch.pool), method)
        assert watch.made_inside
        for tensor, plain in zip(tensors_of(layer), tensors_of(load(Scratch(), method)), strict=True):
            assert tensor.untyped_storage().data_ptr() not in watch.made_inside
            assert torch.equal(tensor.float(), plain.float())


def test_without_a_pool_nothing_is_copied() -> None:
    scratch = Scratch()
    weight = quantize_weight(torch.ones(4, 4))
    assert scratch.keep(weight) is weight
    assert scratch.keep(weight.data) is weight.data
