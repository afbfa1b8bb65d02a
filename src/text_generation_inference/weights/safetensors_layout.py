"""The header of a safetensors file whose tensors are written after it, one at a time, in the order given."""

import json
import struct
from collections.abc import Mapping
from typing import Any


class SafetensorsLayout:
    def __init__(self, tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> None:
        """Of each tensor its type, as the format names it, its shape, and its bytes."""
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        start = 0
        for name, (dtype, shape, num_bytes) in tensors.items():
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + num_bytes]}
            start += num_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data begins 8-byte aligned
        self.num_bytes = start
        self.header = struct.pack("<Q", len(text)) + text
