"""The table of Triton ops.

Importing this needs no Triton; `load_ops` does.
"""

import importlib.util
from collections.abc import Callable

from text_generation_inference.kernels.ops import Ops

_FAST_MULTIPLE = 64  # rows that begin on no multiple of 16 bytes are for the library's slowest kernels
_GLUON_VERSIONS = ((3, 6), (3, 7))  # of Triton: in others what the kernels for Hopper are written in may differ


def load_ops(num_processors: int, description: str = "", flashinfer: bool = False) -> Ops | str:
    """For a device with so many processors, or the reason why the reference ops have to do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    import torch

    from text_generation_inference.kernels import flash_segments, segments
    from text_generation_inference.kernels.triton import attention, choice, fused_decode, norms_rotary, state
    from text_generation_inference.kernels.triton.experts import TritonExperts
    from text_generation_inference.kernels.triton.latent import TritonLatentAttention
    from text_generation_inference.kernels.triton.launch import has_room
    from text_generation_inference.kernels.triton.linear import TritonLinear, logits
    from text_generation_inference.kernels.triton.low_bit_linear import pack_low_bit
    from text_generation_inference.kernels.triton.rotate_heads import rotate_heads
    from text_generation_inference.kernels.triton.routing import route

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    capability = (major, minor)
    paged_attention = attention.PagedAttention(
        num_processors,
        bulk_copies=has_room(capability),
        async_copies=capability >= (8, 0),
        specialised=specialised(capability),
    )
    if flashinfer:
        from text_generation_inference.kernels.flashinfer_prompts import FlashinferPrompts

        paged_attention.prompts = FlashinferPrompts(torch.device("cuda", torch.cuda.current_device()))
    latent_attention = TritonLatentAttention(num_processors, capability, latent_in_flight(capability))
    linear = TritonLinear(num_processors, capability)
    experts = TritonExperts(capability)
    return Ops(
        description,
        fast_multiple=_FAST_MULTIPLE,
        fp8_attention=False,  # decoding waits for keys and values, which are in FP8 all the same
        pack_low_bit=pack_low_bit,
        low_bit_keeps_wide=True,
        linear=linear,
        linear_unscaled=linear.linear_unscaled,
        logits=logits,
        make_fused_decode=fused_decode.MakeFusedDecode(
            paged_attention,
            latent_attention,
            experts,
            num_processors,
            fp8=capability >= (8, 9),
            roomy=has_room(capability),
            low_bit=capability >= (8, 0),
        ),
        rms_norm=norms_rotary.rms_norm,
        add_rms_norm=norms_rotary.add_rms_norm,
        layer_norm=norms_rotary.layer_norm,
        add_layer_norm=norms_rotary.add_layer_norm,
        gelu=norms_rotary.gelu,
        gelu_tanh=norms_rotary.gelu_tanh,
        quick_gelu=norms_rotary.quick_gelu,
        relu=norms_rotary.relu,
        silu=norms_rotary.silu,
        silu_mul=norms_rotary.silu_mul,
        gelu_mul=norms_rotary.gelu_mul,
        gelu_tanh_mul=norms_rotary.gelu_tanh_mul,
        experts=experts,
        route=route,
        rotary_and_cache=norms_rotary.rotary_and_cache,
        attention=paged_attention,
        rotate_heads=rotate_heads,
        segment_attention=(flash_segments if capability >= (8, 0) else segments).segment_attention,
        latent_attention=latent_attention,
        apply_writes=state.apply_writes,
        gather_inputs=state.gather_inputs,
        greedy_into=choice.greedy_into,
        choose_into=choice.Choice(),
    )


def specialised(capability: tuple[int, int]) -> Callable[..., None] | None:
    """Attention of long prompts for GPUs of capability 9.0."""
    if not _has_gluon(capability):
        return None
    from text_generation_inference.kernels.triton.hopper_attention import attend

    return attend


def latent_in_flight(capability: tuple[int, int]) -> Callable[..., int] | None:
    """Decode attention over latents for GPUs of capability 9.0."""
    if not _has_gluon(capability):
        return None
    from text_generation_inference.kernels.triton.hopper_latent import decode

    return decode


def _has_gluon(capability: tuple[int, int]) -> bool:
    """Whether the GPU is what these kernels are for, and this Triton one that they were tested with."""
    if capability != (9, 0):
        return False
    import triton  # pyright: ignore

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) in _GLUON_VERSIONS
