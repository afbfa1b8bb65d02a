"""Ranks that share one model: `split` says which part is whose, `collectives` brings results together."""

from text_generation_inference.parallel.split import SINGLE, Parallel

__all__ = ["SINGLE", "Parallel"]
