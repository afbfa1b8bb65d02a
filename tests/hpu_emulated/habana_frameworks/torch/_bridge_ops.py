"""Which of torch's ops a card runs itself, for which types. All else is done on the host, after a wait and two copies.

From the public bridge's own list (HabanaAI/gaudi-pytorch-bridge, scripts/hpu_op.yaml, the version that names types by
generation of card; Gaudi 2 and 3 agree in what is here), read for the ops that this project calls; forms in place and with
`out` count as the op itself. Types there are those of inputs; here, of all tensors of a call. The bridge counts int64 as
int32 and holds bool as int8. From elsewhere: `index_reduce` is not in the list; vLLM computes with it on Gaudi 2 and 3,
and on Gaudi 1 it runs on the host. A stable sort is the card's own along the last dimension of at most 37 numbers
(hpu_ops/sort, its check for falling back). Nobody here has seen a card do it: `make test-hpu` reads the card's own count.
"""

from habana_frameworks.torch._card import card
from habana_frameworks.torch._emulation import GENERATION

_BITS = {
    "u8": 0, "i8": 1, "i16": 2, "i32": 3, "i64": 4, "f16": 5, "f32": 6, "f64": 7,
    "bool": 11, "bf16": 15, "e5m2": 23, "e4m3": 24,
}  # fmt: skip
_FLOATS, _INTS, _SMALL, _BOOL, _FP8 = "f32 bf16", "i32 i64", "u8 i8 i16", "bool", "e4m3 e5m2"
_ALL = f"{_FLOATS} {_INTS} {_SMALL} {_BOOL} {_FP8}"
_TYPES = {
    # Views and moves.
    _ALL: """alias as_strided _reshape_alias view expand permute transpose t select slice squeeze unsqueeze split unbind
        unfold detach resize_ copy clone fill zero cat where index_select index_copy constant_pad_nd repeat embedding
        _local_scalar_dense equal set""",
    f"{_FLOATS} {_INTS} {_SMALL} {_BOOL}": """eq ne lt le gt ge mul div gather index scatter masked_fill masked_scatter
        any all logical_and logical_or logical_not logical_xor cumsum nonzero masked_select isin isneginf isposinf isinf
        isnan isfinite index_put _index_put_impl_""",
    f"{_FLOATS} {_INTS} {_SMALL} {_FP8}": "add sub rsub mul abs amax amin clamp clamp_min clamp_max maximum minimum",
    f"{_FLOATS} {_INTS} {_BOOL} {_FP8}": "sum max min",
    f"{_FLOATS} {_INTS} {_SMALL}": """arange argmax argmin ceil floor trunc nansum pow flip roll floor_divide remainder
        fmod""",
    f"{_INTS} {_SMALL} {_BOOL}": """bitwise_and bitwise_or bitwise_xor bitwise_not __rshift__ __lshift__
        bitwise_right_shift bitwise_left_shift""",
    f"{_FLOATS} {_INTS} i16": "topk sort",
    f"{_FLOATS} {_INTS}": """neg addcmul index_add scatter_add scatter_reduce searchsorted one_hot cumprod linspace
        index_reduce prod""",
    f"{_FLOATS} i8 bool": "tril triu",
    f"{_FLOATS} {_FP8}": "mm bmm addmm reciprocal",
    _FLOATS: """_softmax _log_softmax linear baddbmm addmv mv dot exp exp2 log log1p log2 sqrt rsqrt sin cos tanh sigmoid erf
        relu gelu silu elu softplus hardswish leaky_relu mean var std var_mean norm linalg_vector_norm native_layer_norm
        native_group_norm convolution convolution_overrideable round sign lerp upsample_bicubic2d upsample_bilinear2d
        upsample_nearest2d avg_pool2d _adaptive_avg_pool2d""",
}
_ON_THE_HOST_OF = {"Gaudi": {"index_reduce"}}


def _read(words: str) -> int:
    return sum(1 << _BITS[word] for word in words.split())


def _table() -> dict[str, int]:
    found: dict[str, int] = {}
    for types, names in _TYPES.items():
        for name in names.split():
            found[name] = found.get(name, 0) | _read(types)
    for name in _ON_THE_HOST_OF.get(GENERATION, ()):
        del found[name]
    return found


_KNOWN = _table()


def _runs_on_card(op: str, types: int) -> bool:
    if not op.startswith("aten::"):
        return True  # the card's own, and sums over ranks
    name, _, overload = op.removeprefix("aten::").partition(".")
    if "long_and_stable" in overload:
        return False
    known = _KNOWN.get(name, _KNOWN.get(name.rstrip("_")))
    return known is not None and not types & ~known


def fall_backs() -> dict[str, int]:
    """Calls of this process that a card would not have done itself, by op and types."""
    found: dict[str, int] = {}
    for (op, types), calls in card.ops().items():
        if not _runs_on_card(op, types):
            words = [word for word, bit in _BITS.items() if types >> bit & 1]
            found[f"{op}({', '.join(words)})"] = calls
    return found
