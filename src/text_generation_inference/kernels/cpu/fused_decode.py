"""All layers of a decoder as one native op: what the kernels know of a layer, and which layers they can compute."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_void_p

import torch
from torch import Tensor

from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.cpu.experts import PackedExperts
from text_generation_inference.kernels.cpu.ops import ACTIVATIONS, MAX_HEAD_DIM, NativeOps, Packed, are_rows
from text_generation_inference.kernels.fused_decode import FusedLayer
from text_generation_inference.kernels.routing import SoftmaxRouting

_NORMS = ("input_norm", "post_norm", "attention_out_norm", "mlp_out_norm", "q_norm", "k_norm")
_MATRICES = ("qkv", "o", "gate_up", "down")
_BIASES = ("qkv_bias", "o_bias", "gate_up_bias", "down_bias")
_CACHES = ("k_cache", "v_cache")


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in (*_NORMS, *_MATRICES, *_BIASES, *_CACHES)),
        *((name, c_void_p) for name in ("cos_sin", "router", "expert_gate_up", "expert_down")),
        *((name, ctypes.c_int64) for name in ("window", "rotary_dim", "positions", "blocks")),
        *((name, ctypes.c_int64) for name in ("num_experts", "top_k", "normalised")),
        *((name, c_float) for name in ("softcap", "routing_factor")),
    )


class _FusedDecodeStruct(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "final_norm")),
        *((name, ctypes.c_int64) for name in ("num_layers", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "activation")),
        *((name, c_float) for name in ("eps", "scale")),
    )


class NativeFusedDecode:
    """The layers of a decoder as one op. Keeps alive all memory it points to."""

    __slots__ = ("_kept", "_ops", "_run", "address", "hidden")

    def __init__(self, ops: NativeOps, hidden: int, address: int, kept: object) -> None:
        self._ops = ops
        self._run: Callable[..., int] = ops.library.tgi_run_fused_decode
        self.hidden = hidden
        self.address = address
        self._kept = kept

    def __call__(self, x: Tensor, batch: Batch) -> Tensor | None:
        """x `[tokens, hidden]` (embeddings) through all layers and the final norm -> `[tokens, hidden]`.

        None for a padded pass of one phase.
        """
        tokens = x.shape[0]
        if not isinstance(batch.meta, PagedMeta):
            return None
        meta, seq_lens = batch.meta, batch.seq_lens
        tables = meta.block_tables
        # Of layers that read a window, where these have blocks of their own.
        window_tables, window_index = meta.window_tables, batch.window_index
        if window_tables is None or window_index is None:
            window_tables, window_index = tables, batch.kv_index
        if not (
            are_rows(x)
            and x.is_contiguous()
            and x.shape[1] == self.hidden
            and tables.dtype is window_tables.dtype is seq_lens.dtype is torch.int32
            and batch.positions.dtype is batch.kv_index.dtype is window_index.dtype is torch.int64
            and len(batch.positions) == len(batch.kv_index) == len(window_index) == tokens
            and tables.stride(1) == window_tables.stride(1) == 1
            and tables.shape == window_tables.shape
            and tables.stride(0) == window_tables.stride(0)
            and window_index.is_contiguous()
            and seq_lens.is_contiguous()
            and batch.positions.is_contiguous()
            and batch.kv_index.is_contiguous()
        ):
            raise ValueError("a batch for a fused pass holds contiguous float32, int64 and int32 tensors of one length")
        num_chunks = len(meta.chunk_starts_cpu)
        starts = ends = None
        if num_chunks:
            starts = (ctypes.c_int64 * num_chunks)(*meta.chunk_starts_cpu)
            ends = (ctypes.c_int64 * num_chunks)(*meta.chunk_ends_cpu)
        out = torch.empty((tokens, self.hidden))
        self._ops.note_computing()
        if self._run(
            self.address, x.data_ptr(), tokens, batch.positions.data_ptr(), batch.kv_index.data_ptr(),
            window_index.data_ptr(), tables.data_ptr(), window_tables.data_ptr(), tables.stride(0), tables.shape[1],
            seq_lens.data_ptr(), meta.num_decode, num_chunks, starts, ends, out.data_ptr(), self._ops.num_threads,
        ):  # fmt: skip
            raise IndexError("a position, a cache index or a block id of the batch is out of range")
        return out


class MakeNativeFusedDecode:
    """The op `make_fused_decode`."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def __call__(
        self,
        layers: Sequence[FusedLayer],
        norm: Tensor,
        cos_sin: Tensor,
        *,
        heads: int,
        eps: float,
        scale: float,
        activation: str = "silu",  # or gelu_tanh
    ) -> NativeFusedDecode | None:
        """None where something in the layers has no native kernel."""
        if any(layer.latents is not None or layer.shared is not None for layer in layers):
            return None
        first = layers[0]
        _, block_size, kv_heads, head_dim = first.k_cache.shape
        tables = [cos_sin if layer.cos_sin is None else layer.cos_sin for layer in layers]
        tensors = [norm, *tables]
        structs = (_LayerStruct * len(layers))()
        for layer, table, struct in zip(layers, tables, structs, strict=True):
            if layer.k_cache.shape[1:] != first.k_cache.shape[1:] or layer.v_cache.shape != layer.k_cache.shape:
                return None
            if not _set_matrices(struct, layer, first):
                return None
            if layer.sinks is not None or (layer.experts is not None and layer.experts.gate != activation):
                return None
            for name in (*_NORMS, *_BIASES, *_CACHES):
                value = getattr(layer, name)
                if isinstance(value, Tensor):
                    tensors.append(value)
                    setattr(struct, name, value.data_ptr())
            struct.cos_sin, struct.rotary_dim, struct.positions = table.data_ptr(), table.shape[1], table.shape[0]
            struct.window, struct.softcap = layer.window or 0, layer.softcap or 0.0
            struct.blocks = layer.k_cache.shape[0]
        _check_shapes(first, heads, kv_heads, head_dim)
        if head_dim % 8 or head_dim > MAX_HEAD_DIM or activation not in ACTIVATIONS:
            return None
        if any(table.shape[1] > head_dim for table in tables):
            return None
        if not all(t.dtype is torch.float32 and t.is_contiguous() and t.device.type == "cpu" for t in tensors):
            return None
        fused = _FusedDecodeStruct(
            ctypes.addressof(structs), norm.data_ptr(), len(layers), heads, kv_heads, head_dim, block_size,
            ACTIVATIONS.index(activation), eps, scale,
        )  # fmt: skip
        kept = (fused, structs, tuple(layers), tensors)
        return NativeFusedDecode(self._ops, first.o.shape[0], ctypes.addressof(fused), kept)


def _set_matrices(struct: _LayerStruct, layer: FusedLayer, first: FusedLayer) -> bool:
    """False where one of them is not in a form, or of a size, that the kernels take."""
    for name in ("qkv", "o"):
        weight = getattr(layer, name)
        if not isinstance(weight, Packed) or weight.shape != getattr(first, name).shape:
            return False
        setattr(struct, name, weight.address)
    gate_up, down, experts = layer.gate_up, layer.down, layer.experts
    if experts is None:
        if not isinstance(gate_up, Packed) or not isinstance(down, Packed):
            return False
        if first.experts is None and (gate_up.shape != first.gate_up.shape or down.shape != first.down.shape):
            return False
        struct.gate_up, struct.down = gate_up.address, down.address
        return True
    router, rule = experts.router, experts.routing
    more = (experts.router_bias, experts.correction, layer.gate_up_bias, layer.down_bias)
    if not (
        all(each is None for each in more)
        and isinstance(router, Packed)
        and isinstance(gate_up, PackedExperts)
        and isinstance(down, PackedExperts)
        and isinstance(rule, SoftmaxRouting)
        and rule.top_groups >= rule.num_groups
        and rule.p_norm in (None, 1)
        and rule.top_k <= router.out_features == len(gate_up.matrices)
    ):
        return False
    struct.router, struct.expert_gate_up, struct.expert_down = router.address, gate_up.address, down.address
    struct.num_experts, struct.top_k = len(gate_up.matrices), rule.top_k
    struct.normalised, struct.routing_factor = rule.p_norm is not None, rule.factor
    return True


def _check_shapes(layer: FusedLayer, heads: int, kv_heads: int, head_dim: int) -> None:
    hidden, width = layer.o.shape[0], heads * head_dim
    count = 1 if layer.experts is None else layer.experts.router.shape[0]
    shapes = {"qkv": (width + 2 * kv_heads * head_dim, hidden), "o": (hidden, width)}
    shapes["down"] = (count * hidden, layer.down.shape[1])
    shapes["gate_up"] = (count * 2 * layer.down.shape[1], hidden)
    if any(tuple(getattr(layer, name).shape) != shape for name, shape in shapes.items()):
        raise ValueError("the matrices of a fused layer do not fit each other")
