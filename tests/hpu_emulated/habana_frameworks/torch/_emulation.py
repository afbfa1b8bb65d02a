"""What the modules of the stand-in share: the mode, the card that is played, what is counted."""

import gc
import os
import warnings

import torch

# On some virtual machines oneDNN's AMX code for small bfloat16 products ends the process; it reads this at first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

LAZY = os.environ.get("PT_HPU_LAZY_MODE", "1") != "0"  # read once, as the real one does
GENERATION = os.environ.get("EMULATED_GAUDI", "Gaudi2")
assert GENERATION in ("Gaudi", "Gaudi2", "Gaudi3"), GENERATION
FP8_MAX = 448.0 if GENERATION == "Gaudi3" else 240.0

warnings.filterwarnings("ignore", "index_reduce")  # torch's own op on the CPU announces itself


class Books:
    """Counters of the process."""

    def __init__(self) -> None:
        self.limit = int(os.environ.get("EMULATED_HPU_BYTES", 16 << 30))
        self.graph_bytes = 0  # workspaces of captured graphs
        self.peak = 0
        self._tensor_bytes = 0  # when last counted
        self.compilations = 0
        self.recipes: dict[object, int] = {}  # passes compiled outside graphs, and the bytes that each takes
        self.mark_steps = 0
        self.recompute = False
        self.capturing = False

    def in_use(self) -> int:
        """Bytes of all tensors of the process, each storage once: the CPU's memory is the card's here."""
        plain, parameter = torch.Tensor, torch.nn.Parameter
        tensors = [found for found in gc.get_objects() if type(found) is plain or type(found) is parameter]
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
        self._tensor_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        self.peak = max(self.peak, self._tensor_bytes + self.graph_bytes)
        return self._tensor_bytes + self.graph_bytes

    def check_memory(self, more: int) -> None:
        """Before a graph or a pass takes memory. Far from the limit the last count will do."""
        self.peak = max(self.peak, self._tensor_bytes + self.graph_bytes + more)
        if 2 * (self._tensor_bytes + self.graph_bytes + more) < self.limit:
            return
        used = self.in_use() + more
        if used > self.limit:
            raise RuntimeError(
                f"[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::{more} ({more >> 20})MB"
            )

    def compiled(self, key: object, num_bytes: int) -> None:
        """A pass outside graphs, which is new, and what it holds at a time."""
        self.recipes[key] = num_bytes
        self.compilations += 1


books = Books()
