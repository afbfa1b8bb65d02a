"""Attention of `transformers` models over our paged cache: the function that they call, and what a trial finds out.

`transformers_fallback` owns the models. Modelling code looks a function up by the name in its config; without masks
under that name none are built. In a trial pass over tensors without values (`look`) they are built all the same, and
every layer's call is looked at: widths, scale, window, soft cap, sinks. What attention over a paged cache would get
wrong is refused there.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from text_generation_inference.devices.device import Ops
from text_generation_inference.kernels.batch import Batch

NAME = "tgi_paged"

_FAR = 1 << 20  # a position beyond every window
_NEAR = (0, 1, 2, 7, 100, 1000)  # and some close to the beginning
_SINKS = "s_aux"
_HARMLESS = ("position_ids", "position_embeddings", "cache_position")  # tensors that modelling code hands on unread


_MaskFunction = Callable[..., Any]


class NotServed(Exception):
    """Why a model cannot be computed this way."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer's calls have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool = False  # each head has one more score, without a value, which comes with every call


@dataclass(slots=True)
class Pass:
    """What the calls of one pass read and write."""

    ops: Ops
    layers: list[Layer]
    batch: Batch
    windowed: Batch  # of layers that read a window
    caches: list[tuple[Tensor, ...]]
    no_rotation: Tensor  # [positions, 2] float32: an angle of 0, as keys come rotated


@dataclass(slots=True)
class _Trial:
    layers: dict[int, Layer] = field(default_factory=dict[int, Layer])
    masks: dict[int, tuple[Tensor, Callable[..., Any]]] = field(
        default_factory=dict[int, tuple[Tensor, Callable[..., Any]]]
    )


_current: ContextVar[Pass | _Trial] = ContextVar("tgi_attention")


@contextmanager
def attending(to: Pass | _Trial) -> Generator[None, None, None]:
    token = _current.set(to)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Make the function known to `transformers`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """-> `[1, tokens, heads, value_dim]`"""
    call = _current.get()
    if isinstance(call, _Trial):
        return _observe(call, module, query, key, value, attention_mask, kwargs), None
    number: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    layer = call.layers[number]
    k_cache, v_cache = call.caches[number]
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))  # [tokens, heads, dim]
    if layer.value_dim < layer.head_dim:
        v = F.pad(v, (0, layer.head_dim - layer.value_dim))
    batch = call.batch if layer.window is None else call.windowed
    q = call.ops.rotary_and_cache(q, k, v, call.no_rotation, batch, k_cache, v_cache)
    sinks = kwargs[_SINKS].float().contiguous() if layer.has_sinks else None
    mixed = call.ops.attention(q, k, v, k_cache, v_cache, batch, layer.scale, layer.window, layer.softcap, sinks=sinks)
    return mixed.view(1, -1, layer.num_heads, layer.head_dim)[..., : layer.value_dim], None


# -- the trial -------------------------------------------------------------------------------------------------------


def look(compute: Callable[[], object], num_layers: int) -> list[Layer]:
    """What the layers do in a pass that `compute` makes; raises `NotServed`."""
    from transformers import AttentionMaskInterface

    trial = _Trial()

    def note(mask_function: _MaskFunction, q_length: int, kv_length: int, **_: Any) -> Tensor:
        mask = torch.ones((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        trial.masks[id(mask)] = (mask, mask_function)
        return mask

    AttentionMaskInterface.register(NAME, note)
    try:
        with attending(trial):
            compute()
    finally:
        del AttentionMaskInterface._global_mapping[NAME]  # pyright: ignore[reportPrivateUsage]
    if sorted(trial.layers) != list(range(num_layers)):
        raise NotServed(
            f"{len(trial.layers)} of its {num_layers} layers attend through the interface of transformers: the others"
            " keep something that is no cache of keys and values"
        )
    return [trial.layers[number] for number in range(num_layers)]


def _observe(
    trial: _Trial,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int) or number in trial.layers:
        raise NotServed("a layer attends more than once, or does not say which one it is")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise NotServed("it looks at tokens that come later")
    sinks = kwargs.get(_SINKS)
    known = _HARMLESS if sinks is None or sinks.shape != query.shape[1:2] else (*_HARMLESS, _SINKS)
    others = [name for name, given in kwargs.items() if isinstance(given, Tensor) and name not in known]
    if others:
        raise NotServed(f"its attention needs `{others[0]}`")
    window = kwargs.get("sliding_window")
    if attention_mask is not None:
        if id(attention_mask) not in trial.masks:
            raise NotServed("it makes a mask of its own")
        window = read_window(trial.masks[id(attention_mask)][1])
    _, heads, tokens, dim = query.shape
    scale, softcap = kwargs.get("scaling"), kwargs.get("softcap")
    layer = Layer(
        num_heads=heads,
        num_kv_heads=key.shape[1],
        head_dim=dim,
        value_dim=value.shape[-1],
        scale=dim**-0.5 if scale is None else float(scale),
        window=window,
        softcap=None if softcap is None else float(softcap),
        has_sinks=sinks is not None,
    )
    if key.shape[-1] != dim or layer.value_dim > dim or heads % layer.num_kv_heads:
        raise NotServed(f"its keys and values have shapes {list(key.shape)} and {list(value.shape)}")
    trial.layers[number] = layer
    return query.new_empty((1, tokens, heads, layer.value_dim))


def read_window(mask_function: _MaskFunction) -> int | None:
    """The window that a mask gives; what is neither causal nor a window of the past is refused."""

    def sees(query: int, keys: Tensor) -> Tensor:
        found = mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)
        if isinstance(found, Tensor) and found.is_meta:
            raise NotServed("its mask depends on more than positions")
        return torch.as_tensor(found).expand(keys.shape)

    seen = sees(_FAR, _FAR - torch.arange(_FAR + 1))
    count = int(seen.sum())
    window = None if count > _FAR else count
    for query in (*_NEAR, *(near + (window or 0) for near in _NEAR), _FAR):
        keys = torch.arange(query + 3)
        distance = query - keys
        expected = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if not torch.equal(sees(query, keys), expected):
            raise NotServed("its mask is neither causal nor a window of the past")
    return window
