"""What config.json says of matrices in integers, in the words that GPTQ, AWQ, Marlin and AutoRound share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from text_generation_inference.errors import ModelFormatError
from text_generation_inference.files import shorten
from text_generation_inference.quant.config_fields import Fields, NamePattern

WAY_OUT = (
    "Use another version of the model: GPTQ (2, 3, 4 or 8 bits, `checkpoint_format` gptq, gptq_v2 or marlin), AWQ"
    " (gemm), a GGUF file, or the unquantised model, with `quantize` bitsandbytes-nf4 or fp8 if it should be small."
)
MAX_GROUP_SIZE = 1 << 30  # more inputs than any matrix has
Changes = Mapping[str, Any] | None  # what differs from the others; None: the matrix is plain


@dataclass(frozen=True, slots=True)
class MatrixRules:
    """What is said of single matrices: by their names or whole parts of these, else by the first expression."""

    by_name: Mapping[str, Changes] = field(default_factory=dict[str, Changes])
    by_pattern: tuple[tuple[NamePattern, Changes], ...] = ()

    def find(self, name: str) -> Changes:
        if self.by_name:
            words = name.split(".")
            for length in range(len(words), 0, -1):
                for first in range(len(words) - length + 1):
                    part = ".".join(words[first : first + length])
                    if part in self.by_name:
                        return self.by_name[part]
        return next((changes for pattern, changes in self.by_pattern if pattern.matches(name)), {})


NO_RULES = MatrixRules()


def read_bits(fields: Fields, name: str, *allowed: int) -> int:
    bits = fields.integer(name, 4)
    if bits not in allowed:
        raise fields.refuse(name, " or ".join(map(str, allowed)))
    return bits


def read_group_size(fields: Fields, name: str, default: int = -1) -> int | None:
    """None: all inputs."""
    size = fields.integer(name, default)
    if size != -1 and not 1 <= size <= MAX_GROUP_SIZE:
        raise fields.refuse(name, f"-1 or a number from 1 to {MAX_GROUP_SIZE}")
    return None if size == -1 else size


def read_names(fields: Fields, name: str) -> tuple[str, ...]:
    """Parts of names: a list, or a list of such lists."""
    value = fields.get(name)
    value = [] if value is None else value
    nested: list[Any] = value if isinstance(value, list) else [None]
    flat: list[Any] = [item for each in nested for item in (each if isinstance(each, list) else [each])]
    if not all(isinstance(item, str) and item for item in flat):
        raise ModelFormatError(f"{fields.place}: `{name}` must be a list of names, it is {shorten(value)}")
    return tuple(flat)
