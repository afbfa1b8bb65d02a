"""Kernels in Triton, for any GPU that Triton compiles for. Each has the meaning of its definition in plain torch.

`ops.load_ops` is the only entrance from outside; the other modules import Triton at once.
"""
