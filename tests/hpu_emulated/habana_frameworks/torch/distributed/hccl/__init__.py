"""Ranks. The communication itself is gloo's in tests."""

import os


def initialize_distributed_hpu(
    world_size: int | None = None, rank: int | None = None, local_rank: int | None = None
) -> tuple[int, int, int]:
    world = int(os.environ.get("WORLD_SIZE", world_size or 1))
    number = int(os.environ.get("RANK", -1 if rank is None else rank))
    local = int(os.environ.get("LOCAL_RANK", -1 if local_rank is None else local_rank))
    if world > 1:
        os.environ.setdefault("HLS_MODULE_ID", str(local))
        os.environ.setdefault("ID", str(number))
    return world, number, local
