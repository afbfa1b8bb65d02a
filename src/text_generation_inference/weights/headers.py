"""`Headers`: what the headers of weight files say of each tensor, wherever the files are. Never torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_COMPUTED = ("F32", "BF16", "F16")
_OF_LAYERS = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Headers:
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str]  # as safetensors calls them
    _quantized: frozenset[str] = field(init=False, repr=False)  # beside or below these names there are other tensors

    def __post_init__(self) -> None:
        split = (name.rpartition(".") for name in self.shapes)
        object.__setattr__(self, "_quantized", frozenset(stem for stem, _, last in split if last not in _OF_LAYERS))

    def is_plain(self, matrix: str) -> bool:
        """Whether there is this matrix (`.weight` left out) in a type that is computed in, with nothing like scales."""
        names = (f"{matrix}.weight", matrix)
        return not self._quantized.intersection(names) and any(self.types.get(name) in _COMPUTED for name in names)
