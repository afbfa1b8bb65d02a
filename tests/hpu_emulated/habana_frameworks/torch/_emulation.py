"""What the modules of the stand-in share: the mode, the card that is played, what is counted."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from habana_frameworks.torch._card import card

# On some virtual machines oneDNN's AMX code for small bfloat16 products ends the process; it reads this at first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

LAZY = os.environ.get("PT_HPU_LAZY_MODE", "0") != "0"  # read once, as the real one does; newer releases are eager
GENERATION = os.environ.get("EMULATED_GAUDI", "Gaudi2")
assert GENERATION in ("Gaudi", "Gaudi2", "Gaudi3"), GENERATION
FP8_MAX = 448.0 if GENERATION == "Gaudi3" else 240.0

warnings.filterwarnings("ignore", "index_reduce")  # torch's own op on the CPU announces itself


class Books:
    """Counters of the process. What is about memory is counted by the card."""

    def __init__(self) -> None:
        self.limit = int(os.environ.get("EMULATED_HPU_BYTES", 16 << 30))
        self.compilations = 0
        self.recipes: set[object] = set()  # passes compiled outside graphs
        self.unread_inputs = 0  # of the graphs that were captured, all together
        self.mark_steps = 0
        self.recompute = False
        self.own_ops: set[str] = set()  # of the card's, those that were called
        self._capturing = False

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, num_bytes: int) -> None:
        self._limit = num_bytes
        card.set("limit", num_bytes)

    @property
    def graph_bytes(self) -> int:
        """Workspaces of captured graphs."""
        return card.get("graphs")

    @property
    def peak(self) -> int:
        return card.get("peak")

    @property
    def capturing(self) -> bool:
        return self._capturing

    @capturing.setter
    def capturing(self, value: bool) -> None:
        """In this thread: a graph computes in its own memory, and cannot hold a look at a value."""
        self._capturing = value
        card.set("capturing", value)
        card.set("uncounted", value)

    @contextmanager
    def in_a_graph(self) -> Iterator[None]:
        """What ops of this thread make is in the graph's memory, which is counted already."""
        card.set("uncounted", 1)
        try:
            yield
        finally:
            card.set("uncounted", 0)

    def in_use(self) -> int:
        """Bytes of graphs and of all tensors, with those whose ops were not launched yet."""
        return card.get("in_use")

    def compiled(self, key: object) -> None:
        """A pass outside graphs; each is compiled once."""
        if key not in self.recipes:
            self.recipes.add(key)
            self.compilations += 1


card.set("lazy", LAZY)
card.set("short_e4m3", FP8_MAX < 448)
books = Books()
