"""`Headers`: what the headers of weight files say of each tensor, wherever the files are. Never torch."""

from collections.abc import Mapping
from dataclasses import dataclass

_COMPUTED = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Headers:
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str]  # as safetensors calls them

    def is_plain(self, matrix: str) -> bool:
        """Whether there is this matrix (`.weight` left out) in a type that is computed in, not in fewer bits."""
        return any(self.types.get(name) in _COMPUTED for name in (f"{matrix}.weight", matrix))
