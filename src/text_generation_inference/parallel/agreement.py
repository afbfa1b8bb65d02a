"""Numbers that ranks agree on before the first request, beside their sums: through the store that they met by.

A rank may lack memory where others do not. What follows must be the same on all, or they would never meet again.
"""

from typing import Any

import torch.distributed as dist

_dist: Any = dist  # for what torch leaves without types


class Agreement:
    """Every rank asks the same questions in the same order. Raises `RuntimeError` if some rank does not ask in time."""

    def __init__(self, rank: int, world: int) -> None:
        """Once ranks have met."""
        self._store = _dist.PrefixStore("agreement", _dist.distributed_c10d._get_default_store())
        self._rank, self._world, self._count = rank, world, 0

    def minimum(self, number: int) -> int:
        """The least that any rank says."""
        self._count += 1
        self._store.set(f"{self._count}/{self._rank}", str(number))
        return min(int(self._store.get(f"{self._count}/{rank}")) for rank in range(self._world))


def abort_collectives() -> None:
    """End those that are under way and will never end, where the backend can."""
    if dist.is_initialized() and "nccl" in str(_dist.get_backend_config()):
        _dist.distributed_c10d._abort_process_group()
