"""A matrix of a model and the method it has: how it is stored, held on a device and multiplied.

`Linear` and the embedding are matrices; they hold a method and never ask which. A method is one file beside this one:
`declare` (its tensors beside the weight), `read` or `make` (this rank's part, from a checkpoint or random numbers),
`finish` (repack once), `apply`, `input_form` (what the op before should hand it) and `bytes`.
"""

from collections.abc import Callable

from torch import Tensor

from text_generation_inference.kernels.fp8 import Fp8Weight
from text_generation_inference.kernels.low_bit import LowBitWeight
from text_generation_inference.kernels.matrices import BlockPieces, Product, Rows, Weight, plain
from text_generation_inference.kernels.ops import Ops
from text_generation_inference.weights.declare import Declared, Module, Part, Storage

InputForm = Fp8Weight | None  # what the op before a matrix is told to quantise its result for; None: it should not


class Method(Storage):
    """The plain one: a tensor in the model's type."""

    def finish(self, matrix: "Matrix") -> None:
        """Bring the weight into the form that the device multiplies. Called once, when it has been loaded."""
        if matrix.is_multiplied:
            matrix.weight = matrix.pack(plain(matrix.weight))

    def apply(self, matrix: "Matrix", x: Rows) -> Tensor:
        """x `[tokens, in]` -> `[tokens, out]`, with the bias."""
        return matrix.ops.linear(x, matrix.weight, matrix.bias)

    def logits(self, matrix: "Matrix", hidden: Tensor, out: Tensor | None) -> Tensor:
        """The product of a head, as precise as the device has it, into `out` if there is one (float32)."""
        return matrix.ops.logits(hidden, matrix.weight, out)

    def unscaled(self, matrix: "Matrix") -> Callable[[Rows], Product] | None:
        """The product of which scales may be left to the next op, where there is one; asked once."""
        return None

    def input_form(self, matrix: "Matrix") -> InputForm:
        """Asked once."""
        return None

    def kind(self, matrix: "Matrix") -> object:
        """Matrices of the same kind and shape are multiplied by the same kernels."""
        return type(self)


PLAIN = Method()


class Matrix(Module):
    """`[out, in]`, stacked from `parts`, each of which says which rows or columns this rank keeps."""

    is_stacked = False  # several matrices, which only the op `experts` multiplies
    is_measured = True  # what goes into it can be looked at, to find scales for it
    is_head = False  # what comes out of it are scores of tokens, and its rows are not looked up
    only_as_stored = False  # in few bits where a checkpoint has it so; no method rounds it otherwise
    num_experts = 1
    bias_parts: list[Part] | None = None

    def __init__(self, ops: Ops, parts: list[Part], may_round: bool = True, is_multiplied: bool = True) -> None:
        self.ops = ops
        self.parts = parts
        self.may_round = may_round  # a method may change its values; else it only stores them
        self.is_multiplied = is_multiplied  # by `apply`; else its rows are looked up, or another op takes it as it is
        self.is_delicate = False  # rounding costs most here: stays as it is where it is not stored rounded already
        self.method: Method = PLAIN
        self.weight: Weight  # what the method makes of it
        self.bias: Tensor | None = None
        self.input_form: InputForm = None

    @property
    def shape(self) -> tuple[int, ...]:
        return Declared("weight", self.parts).shape

    @property
    def layer_class(self) -> str:
        """What `transformers` computes it with, by which configurations choose matrices; empty: no layer of its own."""
        return "Linear"

    @property
    def outputs_per_token(self) -> int:
        return self.shape[0]

    @property
    def kind(self) -> object:
        return self.method.kind(self)

    def declare(self) -> list[Declared]:
        return [Declared("weight", self.parts, self.method)]

    def finish(self) -> None:
        self.method.finish(self)
        self.input_form = self.method.input_form(self)

    def pack(self, weight: Tensor | BlockPieces | LowBitWeight) -> Weight:
        """In the form that the op which multiplies it wants."""
        if isinstance(weight, LowBitWeight):
            return self.ops.pack_low_bit(weight)
        if isinstance(weight, BlockPieces):
            return self.ops.pack_blocks(weight.pieces, self.shape[1])
        return self.ops.pack_linear(weight)

    def names(self, prefix: str) -> list[str]:
        """Of its parts as methods and configurations know them: without `.weight`."""
        return [prefix + part.name.removesuffix(".weight") for part in self.parts]
