"""The ops of `kernels.reference` over the native CPU kernels.

Owns the packed weight form and the checks that let a tensor's memory be read directly. What a kernel does
not take (another dtype, FP8, an odd layout or head size) goes to the reference op.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import c_double, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from text_generation_inference.kernels import reference
from text_generation_inference.kernels import segments as segments_definition
from text_generation_inference.kernels.batch import Batch, PagedMeta
from text_generation_inference.kernels.cpu import build
from text_generation_inference.kernels.fp8 import AttentionScales, Fp8Weight
from text_generation_inference.kernels.head_norms import HeadNorms
from text_generation_inference.kernels.matrices import PackedWeight, Product, Rows, Weight
from text_generation_inference.kernels.segments import Segments

_PLAIN_KINDS = ("float32", "bfloat16", "float16")
_GGUF_KINDS = ("q4_0", "q4_1", "q8_0", "q5_0", "q5_1", "iq4_nl", "q4_k", "q5_k", "q6_k")
_LOW_KINDS = ("low4", "low4_offset", "low8", "low8_offset", "table4", "table4_halves", "float4")
KINDS = {kind: number for number, kind in enumerate((*_PLAIN_KINDS, *_GGUF_KINDS, *_LOW_KINDS))}
BLOCKS = {  # weights and bytes of a block
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "iq4_nl": (32, 18),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
ACTIVATIONS = ("silu", "gelu_tanh")
MAX_HEAD_DIM = 576
_FEW_IDS = 64

_float32 = torch.float32
_int64 = torch.int64
_int32 = torch.int32
_uint8 = torch.uint8
_empty = torch.empty

_SIGNATURES: dict[str, tuple[type | None, str]] = {
    # p: pointer, l: long, f: float, i: int
    "tgi_vector_bits": (c_int, ""),
    "tgi_uses_amx": (c_int, ""),
    "tgi_advise_large_pages": (None, "pl"),
    "tgi_plain_kind": (c_int, "plll"),
    "tgi_packed_bytes": (c_long, "p"),
    "tgi_pack": (None, "pplpi"),
    "tgi_linear": (None, "pllpppli"),
    "tgi_embedding": (c_int, "plppi"),
    "tgi_rms_norm": (None, "plplpfllppi"),
    "tgi_gate": (None, "iplllpi"),
    "tgi_rotary_and_cache": (c_int, "pllpllpllpllpplppplllli"),
    "tgi_attention": (c_int, "pllppllpllpllpplllfllfppi"),
    "tgi_segment_attention": (None, "pllpplllpplllfpi"),
    "tgi_latent_cache": (c_int, "pllplpfplpplplllli"),
    "tgi_absorb": (None, "pllpllllllpi"),
    "tgi_latent_attention": (c_int, "ppllpllpllpplllfpi"),
    "tgi_expand_values": (None, "pplllllpi"),
    "tgi_experts": (c_int, "pllppllppiipi"),
    "tgi_greedy": (None, "plllppi"),
    "tgi_run_fused_decode": (c_int, "pplpppppllpllpppi"),
    "tgi_probe_fma": (c_double, "i"),
    "tgi_probe_read": (c_double, "pli"),
}
_ARGUMENTS = {"p": c_void_p, "l": c_long, "f": c_float, "i": c_int}


class _WeightStruct(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("data", c_void_p),
        ("next", c_void_p),
        ("order", c_void_p),
        ("rounds_inputs", ctypes.c_int64),
        ("input_scale", c_float),
    )


@dataclass(frozen=True, slots=True)
class Columns:
    """How the columns of a matrix of codes are laid out, and what its rows of inputs go through before the product."""

    count: int  # whole groups of 32
    shift: int  # 2^shift groups share their scales
    order: Tensor | None = None  # [count] int32: the input of each, -1: none
    rounds_inputs: bool = False
    input_scale: float = 0.0  # of rounded inputs; 0: found from each row


class Packed(PackedWeight):
    """A weight `[out, in]` in the panels the kernels read. `kind` is a key of KINDS; outputs of another kind follow."""

    __slots__ = ("_columns", "_struct", "address", "data", "in_features", "kind", "next", "out_features", "shape")

    def __init__(
        self,
        kind: str,
        out_features: int,
        in_features: int,
        library: ctypes.CDLL,
        following: "Packed | None" = None,
        columns: Columns | None = None,
    ) -> None:
        self.kind = kind
        self._columns = columns or Columns(in_features, 0)  # keeps the order
        self.next = following
        self.out_features = out_features + (0 if following is None else following.out_features)
        self.in_features = in_features
        self.shape = torch.Size((self.out_features, in_features))
        struct = self._struct = _WeightStruct(KINDS[kind], out_features, in_features)
        struct.columns, struct.shift = self._columns.count, self._columns.shift
        struct.next = None if following is None else following.address
        struct.order = None if self._columns.order is None else self._columns.order.data_ptr()
        struct.rounds_inputs, struct.input_scale = self._columns.rounds_inputs, self._columns.input_scale
        self.address = ctypes.addressof(struct)
        size = library.tgi_packed_bytes(self.address)
        self.data = torch.empty(size, dtype=_uint8)  # opaque; torch aligns to 64 bytes
        struct.data = self.data.data_ptr()
        library.tgi_advise_large_pages(struct.data, size)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.next is None else self.next.nbytes)


def _nothing() -> None:
    pass


class NativeOps:
    """Overrides for a device's `ops`; each method has the meaning of its namesake in `kernels.reference`."""

    def __init__(self, library: ctypes.CDLL, threads: int | None = None) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = [_ARGUMENTS[letter] for letter in arguments]
        self.library = library  # with the types of its functions
        self._linear = library.tgi_linear
        self._norm = library.tgi_rms_norm
        self._gate = library.tgi_gate
        self._rotary = library.tgi_rotary_and_cache
        self._attention = library.tgi_attention
        self._segment_attention = library.tgi_segment_attention
        # Without letting go of Python: whoever took it would keep it for longer than a few ids take.
        self._few_embeddings = ctypes.PyDLL(library._name)["tgi_embedding"]
        self._few_embeddings.restype, self._few_embeddings.argtypes = c_int, library.tgi_embedding.argtypes
        self.note_computing: Callable[[], None] = _nothing  # told before what takes long: others have Python meanwhile
        self._threads: Callable[[], int] = torch.get_num_threads if threads is None else lambda: threads
        vectors = {512: "AVX-512", 256: "AVX2"}[library.tgi_vector_bits()]
        self.uses_amx = bool(library.tgi_uses_amx())
        if self.uses_amx:
            vectors += " and AMX"
        self.description = f"native {vectors} kernels, {self._threads()} threads"

    @property
    def num_threads(self) -> int:
        return self._threads()

    def pack_linear(self, weight: Tensor) -> Packed | Tensor:
        """Bring a weight `[out, in]` into panels; a weight that is not float32 stays as it is.

        One whose values 16 bits hold exactly, as those of most files, is kept in these.
        """
        if weight.dtype is not _float32 or weight.dim() != 2 or weight.device.type != "cpu":
            return weight
        weight = weight.detach()
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        kind: int = self.library.tgi_plain_kind(weight.data_ptr(), *weight.shape, weight.stride(0))
        return self.pack_rows(_PLAIN_KINDS[kind], weight, weight.shape[1])

    def pack_blocks(self, pieces: Sequence[tuple[str, Tensor]], in_features: int) -> Packed:
        """Pack pieces, one after the other: the kind of their GGML blocks, uint8 `[rows, bytes_per_row]`."""
        packed = None
        for kind, blocks in reversed(pieces):
            if kind not in BLOCKS:
                raise ValueError(f"cannot pack {kind}: this takes {', '.join(BLOCKS)}")
            weights, size = BLOCKS[kind]
            if in_features % weights or blocks.shape[1] != in_features // weights * size or blocks.dtype is not _uint8:
                raise ValueError(
                    f"{tuple(blocks.shape)} {blocks.dtype} are not {kind} blocks of {in_features} weights a row"
                )
            packed = self.pack_rows(kind, blocks if blocks.stride(1) == 1 else blocks.contiguous(), in_features, packed)
        assert packed is not None
        return packed

    def pack_rows(
        self,
        kind: str,
        rows: Tensor,
        in_features: int,
        following: Packed | None = None,
        columns: Columns | None = None,
    ) -> Packed:
        """Rows of float32 or of blocks, uint8 `[rows, bytes_per_row]`."""
        packed = Packed(kind, rows.shape[0], in_features, self.library, following, columns)
        stride = rows.stride(0) * rows.element_size()
        self.library.tgi_pack(packed.address, rows.data_ptr(), stride, None, self._threads())
        return packed

    def unpack(self, weight: Packed) -> Tensor:
        """The weight as float32 `[out, in]`."""
        return self.embedding(torch.arange(weight.out_features), weight)

    def linear(self, x: Rows, weight: Weight, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x `[tokens, in]` times weight transposed -> `[tokens, out]`."""
        self.note_computing()
        if not isinstance(weight, Packed) or not isinstance(x, Tensor):
            assert not isinstance(weight, Packed)
            return reference.linear(x, weight, bias, dtype)
        if x.dtype is not _float32 or x.dim() != 2 or x.stride(1) != 1:
            wide = x.float().reshape(-1, x.shape[-1]).contiguous()
            return self.linear(wide, weight, bias).to(x.dtype).view(*x.shape[:-1], weight.out_features)
        rows, width = x.shape
        if width != weight.in_features:
            raise ValueError(f"input of {width} features for a weight of {weight.in_features}")
        if bias is not None and (bias.dtype is not _float32 or not bias.is_contiguous()):
            bias = bias.float().contiguous()
        out_features = weight.out_features
        out = _empty((rows, out_features))
        self._linear(
            x.data_ptr(),
            rows,
            x.stride(0),
            weight.address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_features,
            self._threads(),
        )
        return out

    def logits(self, hidden: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
        """hidden `[tokens, hidden]` times weight `[vocab, hidden]` transposed, into `out` if there is one."""
        result = self.linear(hidden, weight)
        return result if out is None else out.copy_(result)

    def embedding(self, ids: Tensor, weight: Weight) -> Tensor:
        """ids `[tokens]`, weight `[vocab, hidden]` -> `[tokens, hidden]`."""
        if not isinstance(weight, Packed):
            return reference.embedding(ids, weight)
        ids = ids.to(_int64).contiguous()
        out = _empty((*ids.shape, weight.in_features))
        look_up = self._few_embeddings if ids.numel() <= _FEW_IDS else self.library.tgi_embedding
        if look_up(ids.data_ptr(), ids.numel(), weight.address, out.data_ptr(), self._threads()):
            raise IndexError(f"a token id is not below {weight.out_features}")
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None) -> Rows:
        """x `[tokens, hidden]`."""
        if quantize_for is not None or not are_rows(x) or not _vector(weight):
            return reference.rms_norm(x, weight, eps, quantize_for)
        rows, width = x.shape
        out = _empty((rows, width))
        self._norm(
            x.data_ptr(),
            x.stride(0),
            None,
            0,
            weight.data_ptr(),
            eps,
            rows,
            width,
            out.data_ptr(),
            None,
            self._threads(),
        )
        return out

    def add_rms_norm(
        self, x: Product, residual: Tensor, weight: Tensor, eps: float, quantize_for: Fp8Weight | None = None
    ) -> tuple[Rows, Tensor]:
        """Add x to the residual, then normalise: (normalised, new residual)."""
        if quantize_for is not None or not are_rows(x) or not are_rows(residual) or not _vector(weight):
            return reference.add_rms_norm(x, residual, weight, eps, quantize_for)
        rows, width = x.shape
        out = _empty((rows, width))
        total = _empty((rows, width))
        self._norm(
            x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), weight.data_ptr(), eps, rows, width,
            out.data_ptr(), total.data_ptr(), self._threads(),
        )  # fmt: skip
        return out, total

    def silu_mul(self, gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
        """gate_up `[tokens, 2 * width]` -> silu(gate) * up `[tokens, width]`."""
        if quantize_for is not None or not are_rows(gate_up):
            return reference.silu_mul(gate_up, quantize_for)
        return self._gated(0, gate_up)

    def gelu_tanh_mul(self, gate_up: Product, quantize_for: Fp8Weight | None = None) -> Rows:
        """gate_up `[tokens, 2 * width]` -> gelu(gate, tanh form) * up `[tokens, width]`."""
        if quantize_for is not None or not are_rows(gate_up):
            return reference.gelu_tanh_mul(gate_up, quantize_for)
        return self._gated(1, gate_up)

    def _gated(self, kind: int, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        width //= 2
        out = _empty((rows, width))
        self._gate(kind, gate_up.data_ptr(), gate_up.stride(0), rows, width, out.data_ptr(), self._threads())
        return out

    def rotary_and_cache(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, head_dim]
        cos_sin: Tensor,  # [positions, rotary_dim] float32: cosines, then sines
        batch: Batch,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_scales: tuple[float, float] = (1.0, 1.0),
        scales: tuple[Tensor, Tensor] | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Rotate q and k by position, write k and v into the cache; return the rotated q."""
        if norms is not None and scales is None:
            (q, k), norms = norms.apply(q, k, self.rms_norm), None
        if not (
            scales is None
            and q.dtype is k.dtype is v.dtype is cos_sin.dtype is k_cache.dtype is v_cache.dtype is _float32
            and q.stride(2) == k.stride(2) == v.stride(2) == 1
            and k_cache.is_contiguous()
            and v_cache.is_contiguous()
            and cos_sin.is_contiguous()
            and batch.positions.is_contiguous()
            and batch.kv_index.is_contiguous()
        ):
            return reference.rotary_and_cache(q, k, v, cos_sin, batch, k_cache, v_cache, kv_scales, scales, norms)
        tokens, heads, head_dim = q.shape
        blocks, block_size, kv_heads, _ = k_cache.shape
        positions, rotary_dim = cos_sin.shape
        out = _empty((tokens, heads, head_dim))
        q_token, q_head, _ = q.stride()
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        if self._rotary(
            q.data_ptr(), q_token, q_head, k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head,
            cos_sin.data_ptr(), rotary_dim, positions, batch.positions.data_ptr(), batch.kv_index.data_ptr(),
            blocks * block_size, out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tokens, heads, kv_heads,
            head_dim, self._threads(),
        ):  # fmt: skip
            raise IndexError("a token's position or cache index is out of range")
        return out

    def attention(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor | None,
        v: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        scale: float,
        window: int | None = None,  # a token sees itself and the `window - 1` tokens before it
        softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
        kv_scales: tuple[float, float] = (1.0, 1.0),
        slopes: Tensor | None = None,  # which the kernel does not add
        sinks: Tensor | None = None,
        attention_chunk: int | None = None,
        in_fp8: AttentionScales | None = None,
    ) -> Tensor:
        """Causal attention of each row's query tokens over its cached tokens -> `[tokens, heads * head_dim]`."""
        self.note_computing()
        tokens, heads, head_dim = q.shape
        meta = batch.meta
        if not isinstance(meta, PagedMeta) or slopes is not None or in_fp8 is not None:
            return reference.attention(
                q, k, v, k_cache, v_cache, batch, scale, window, softcap, kv_scales, slopes, sinks, attention_chunk,
                in_fp8,
            )  # fmt: skip
        tables = meta.block_tables
        seq_lens = batch.seq_lens
        if not (
            q.dtype is k_cache.dtype is v_cache.dtype is _float32
            and head_dim % 8 == 0
            and head_dim <= MAX_HEAD_DIM
            and q.stride(2) == 1
            and k_cache.is_contiguous()
            and v_cache.is_contiguous()
            and tables.dtype is seq_lens.dtype is _int32
            and tables.stride(1) == 1
            and seq_lens.is_contiguous()
        ):
            return reference.attention(
                q, k, v, k_cache, v_cache, batch, scale, window, softcap, kv_scales, slopes, sinks, attention_chunk
            )
        blocks, block_size, kv_heads, _ = k_cache.shape
        starts = ends = None
        num_chunks = len(meta.chunk_starts_cpu)
        if num_chunks:
            starts = (ctypes.c_int64 * num_chunks)(*meta.chunk_starts_cpu)
            ends = (ctypes.c_int64 * num_chunks)(*meta.chunk_ends_cpu)
        out = _empty((tokens, heads * head_dim))
        if self._attention(
            q.data_ptr(), q.stride(0), q.stride(1), k_cache.data_ptr(), v_cache.data_ptr(), blocks, block_size,
            tables.data_ptr(), tables.stride(0), tables.shape[1], seq_lens.data_ptr(), meta.num_decode, num_chunks,
            starts, ends, heads, kv_heads, head_dim, scale, window or 0, attention_chunk or 0,
            softcap or 0.0, None if sinks is None else sinks.data_ptr(), out.data_ptr(), self._threads(),
        ):  # fmt: skip
            raise IndexError("a row's block table does not cover its tokens with blocks of the cache")
        return out

    def segment_attention(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        """q `[rows, heads, dim]`, k and v `[key rows, kv heads, dim]` -> `[rows, heads * dim]`."""
        self.note_computing()
        rows, heads, head_dim = q.shape
        if not (
            q.dtype is k.dtype is v.dtype is _float32
            and head_dim % 8 == 0
            and head_dim <= MAX_HEAD_DIM
            and q.stride(2) == 1
            and all(segments.keys)
        ):
            return segments_definition.segment_attention(q, k, v, segments)
        # What a head reads lies together: rows of all heads would share few sets of the first-level cache.
        k, v = (each.transpose(0, 1).contiguous() for each in (k, v))
        runs, kv_heads = len(segments.queries), k.shape[0]
        starts, key_starts = (
            (ctypes.c_int64 * (runs + 1))(*accumulate(each, initial=0)) for each in (segments.queries, segments.keys)
        )
        out = _empty((rows, heads * head_dim))
        self._segment_attention(
            q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), v.data_ptr(), k.stride(1), k.stride(0), runs, starts,
            key_starts, heads, kv_heads, head_dim, head_dim**-0.5, out.data_ptr(), self._threads(),
        )  # fmt: skip
        return out

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits `[rows, vocab]` -> (first index of the maximum int64 `[rows]`, its log-probability `[rows]`).

        A row whose maximum is not finite has log-probability NaN.
        """
        if not are_rows(logits):
            return greedy(logits)
        rows, vocab = logits.shape
        index = _empty(rows, dtype=_int64)
        logprob = _empty(rows)
        self.library.tgi_greedy(
            logits.data_ptr(), logits.stride(0), rows, vocab, index.data_ptr(), logprob.data_ptr(), self._threads()
        )
        return index, logprob

    def probe_fma(self, threads: int) -> float:
        """Floating-point operations a second that this machine can do, for benchmarks."""
        return self.library.tgi_probe_fma(threads)

    def probe_read(self, memory: Tensor, threads: int) -> float:
        """Bytes a second at which this machine reads a tensor, for benchmarks."""
        return self.library.tgi_probe_read(memory.data_ptr(), memory.nbytes, threads)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`NativeOps.greedy` in plain torch."""
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    index = torch.where(top.isnan(), wide.isnan(), wide == top).int().argmax(-1)
    logprob = wide.log_softmax(-1).gather(-1, index[:, None])[:, 0]
    return index, logprob.masked_fill(~top[:, 0].isfinite(), math.nan)


def are_rows(x: Product) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.dtype is _float32 and x.dim() == 2 and x.stride(1) == 1


def _vector(weight: Tensor) -> bool:
    return weight.dtype is _float32 and weight.is_contiguous()


def load_ops(
    cache_dir: Path,
    threads: int | None = None,  # None: as many as torch uses at the time of each call
    compilers: Sequence[str] = build.COMPILERS,
    march: str = "native",
) -> NativeOps | str:
    """The native ops, or the reason why the reference ops have to do."""
    library = build.load_library(cache_dir, compilers, march)
    return library if isinstance(library, str) else NativeOps(library, threads)
