"""`FeedForward`: what a layer does to each token by itself, whatever it is made of."""

from abc import abstractmethod

from text_generation_inference.kernels.matrices import Product, Rows
from text_generation_inference.quant.method import InputForm
from text_generation_inference.weights.declare import Module


class FeedForward(Module):
    @property
    @abstractmethod
    def input_form(self) -> InputForm:
        """What the norm before it should hand it."""

    @abstractmethod
    def forward(self, x: Rows) -> Product:
        """x `[tokens, hidden]` -> `[tokens, hidden]`."""

    @property
    @abstractmethod
    def kind(self) -> object:
        """Feed-forwards of the same kind run the same kernels."""

    @abstractmethod
    def keep_precise(self) -> None:
        """Its result is not to be rounded more than the checkpoint is."""
