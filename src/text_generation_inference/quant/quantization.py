"""`Quantization`: which method each matrix of a model has. Made once, from config.json, a setting or QUANT_CONFIG."""

from collections.abc import Mapping, Sequence

from text_generation_inference.kernels.fp8 import AttentionScales
from text_generation_inference.quant.method import Matrix, Method


class Quantization:
    method: str  # as config.json or a setting names it
    has_cache_scales: bool = False  # every layer of the checkpoint has scales for a KV cache in FP8
    may_leave: tuple[str, ...] = ()  # file name patterns of tensors that nobody needs
    origin: str  # who asked for it, in an error
    needs_fp8: bool = False  # the device must compute in FP8

    @property
    def rounds_plain(self) -> bool:
        """Whether matrices that a checkpoint has plainly are put into it."""
        return False

    @property
    def rounds_head(self) -> bool:
        """Whether a head is held in another form than the embedding that it may share its tensor with."""
        return False

    @property
    def width_step(self) -> int:
        """Where ranks may cut a matrix without having to hold it otherwise: runs of inputs that stay together."""
        return 1

    @property
    def description(self) -> str:
        """For the log."""
        return ""

    def choose(self, matrix: Matrix, names: Sequence[str]) -> Method | None:
        """The method of a matrix whose parts have these names, without `.weight`; None: it is plain."""
        raise NotImplementedError

    def cache_scale(self, attention: str, side: str) -> float | None:
        """A measured one, of the keys (`side` k) or values (v) of one attention, by its path."""
        return None

    def attention_scales(self, attention: str, softmax_scale: float) -> AttentionScales | None:
        """Measured ones, of the products of one attention, by its path; None: they are in the model's type."""
        return None

    def named_as_in(self, stored: Mapping[str, tuple[int, ...]]) -> "Quantization":
        """With the names (and shapes) of the tensors that a checkpoint has."""
        return self
