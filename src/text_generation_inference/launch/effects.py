"""What settings and variables have no effect where a model runs, or exclude each other.

Nothing that somebody set is ignored without a word: it does what it says, is refused, or is explained here.
"""

import importlib.util
import shutil
from collections.abc import Collection, Mapping

from text_generation_inference.config import BUCKET_RANGES, LINEAR_SIZES, ServerConfig, choose_strategy, variable_of
from text_generation_inference.devices.driver import read_driver
from text_generation_inference.errors import StartError
from text_generation_inference.launch import variables

# Settings that are accepted and change nothing, with the reason. Variables that are no setting: `variables`.
NO_EFFECT = {
    "trust_remote_code": "no code of a model is ever run",
    "shard_uds_path": "processes talk over sockets in a private folder",
    "master_addr": "one process serves the model",
    "master_port": "one process serves the model",
    "prometheus_port": "nothing is served there; /metrics is on the main port",
    "usage_stats": "nothing is ever sent",
    "max_client_batch_size": "/v1/completions takes as many prompts as --max-concurrent-requests lets run",
    "ngrok_authtoken": "no tunnel is opened",
    "ngrok_edge": "no tunnel is opened",
    "attention": "the device has one kind of attention",  # but see _reason_of_attention
    "prefill_chunking": "long prompts are always computed in parts",
}


# Likewise, where the model runs on something else.
NO_EFFECT_WITHOUT_GPU = {
    "cuda_graphs": "the {device} captures no graphs",
    "cuda_memory_fraction": "the model runs on the {device}; --max-batch-total-tokens limits the KV cache",
}
NO_EFFECT_WITHOUT_GAUDI = {
    "use_flash_attention": "the device has one kind of attention",
    "flash_attention_recompute": "the device has one kind of attention",
    **dict.fromkeys(
        (
            "pt_hpu_lazy_mode",
            "enable_hpu_graph",
            "limit_hpu_graph",
            "hpu_memory_fraction",
            "tgi_graph_reserved_mem",
            "vllm_fp32_softmax",
        ),
        "it is about Gaudi, and the model runs on the {device}",
    ),
}
# What a plan of shapes excludes.
_NOT_PADDED = {
    "prefix_caching": "where batches are padded, prompts are always computed from their beginning",
    "prefill_chunking": "where batches are padded, prompts are always computed in one step",
}
_OF_PLANS = ("bucket_strategy", "vllm_exponential_bucketing", *LINEAR_SIZES, *BUCKET_RANGES)
_OF_WARM_UP = ("warmup_enabled", "vllm_skip_warmup")
_OF_SCHEDULED_PROFILES = ("prof_waitstep", "prof_warmupstep", "prof_ranks")
_OF_ALL_PROFILES = ("prof_path", "prof_record_shapes")

# Values that ask for what is done anyway.
_AS_IT_IS = {
    "trust_remote_code": False,
    "usage_stats": "off",
    "prefill_chunking": True,
    "warmup_enabled": True,
    "vllm_skip_warmup": False,
}


def check_given(config: ServerConfig, given: Collection[str]) -> None:
    """Refuse what was asked for in so many words and excludes something else that was."""
    excluded = [name for name in _NOT_PADDED if name in given and getattr(config, name)]
    if excluded and _is_padded(config):
        name = excluded[0]
        raise StartError(
            f"Invalid argument: `{name}` is on, but {_NOT_PADDED[name]}:"
            f" set {variable_of(name)}=0, or --bucketing false"
        )
    if config.bucketing is False and device_of(config) == "hpu":
        raise StartError(
            "Invalid argument: `bucketing` is false, but on Gaudi each new shape is compiled while requests wait: leave"
            " it out, or choose larger sizes with BATCH_BUCKET_SIZE and PAD_SEQUENCE_TO_MULTIPLE_OF"
        )
    if config.vllm_skip_warmup and config.warmup_enabled and "warmup_enabled" in given:
        raise StartError(
            "Invalid argument: WARMUP_ENABLED=true and VLLM_SKIP_WARMUP=true exclude each other: leave one out"
        )


def explain(config: ServerConfig, given: Collection[str], flags: Mapping[str, str]) -> list[str]:
    """One line for each setting or variable in `given` that has no effect, and why. `flags` are those of settings."""
    reasons = {**NO_EFFECT, **_reasons_of_device(config, given), **variables.NO_EFFECT}
    as_it_is = {**_AS_IT_IS, "prefill_chunking": reasons["prefill_chunking"] == NO_EFFECT["prefill_chunking"]}
    return [
        f"{flags.get(name, variable_of(name))} has no effect: {reason}"
        for name, reason in reasons.items()
        if reason and name in given and getattr(config, name, None) != as_it_is.get(name, "")
    ]


def _reasons_of_device(config: ServerConfig, given: Collection[str]) -> dict[str, str]:
    """Settings that have no effect where the model runs, or beside others."""
    reasons: dict[str, str] = {}
    depending = {"attention", *NO_EFFECT_WITHOUT_GPU, *NO_EFFECT_WITHOUT_GAUDI, *_OF_PLANS, *_OF_WARM_UP, *_NOT_PADDED}
    device = device_of(config) if depending.intersection(given) else "cpu"  # it may take a moment to find out
    shown = {"cpu": "CPU", "cuda": "GPU", "hpu": "Gaudi card"}.get(device, device)
    for wanted, table in (("cuda", NO_EFFECT_WITHOUT_GPU), ("hpu", NO_EFFECT_WITHOUT_GAUDI)):
        if device != wanted:
            reasons |= {name: text.format(device=shown) for name, text in table.items()}
    if device == "hpu":
        reasons |= _reasons_on_gaudi(config)
    if device == "cuda":
        reasons["attention"] = _reason_of_attention(config)
    if not _is_padded(config, device):
        reasons |= dict.fromkeys((*_OF_PLANS, *_OF_WARM_UP), "batches are not padded; --bucketing true pads them")
    else:
        reasons["prefill_chunking"] = _NOT_PADDED["prefill_chunking"]
        strategy = choose_strategy(config)
        others = [name for name in BUCKET_RANGES if name.endswith("_limit") == (strategy == "linear")]
        if strategy == "exponential":
            others += LINEAR_SIZES
            others.remove("vllm_decode_block_bucket_step")  # it is read there too
        reasons |= dict.fromkeys(others, f"the strategy is {strategy}")
    return reasons | _reasons_of_profiles(config)


def _reason_of_attention(config: ServerConfig) -> str:
    """Nothing if it has an effect."""
    if config.attention != "flashinfer":
        return "a GPU runs our own kernels, or flashinfer's for prompts with ATTENTION=flashinfer"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install flashinfer-python); our own kernels run, which need nothing"
    return ""


def _reasons_of_profiles(config: ServerConfig) -> dict[str, str]:
    if config.prof_step and 0 in config.prof_ranks:
        return {}
    why = "no profile is taken at start; PROF_STEP=N takes one"
    reasons: dict[str, str] = {}
    if config.prof_step:
        why = "PROF_RANKS does not name 0, which is the only rank"
        reasons["prof_step"] = why
    reasons |= dict.fromkeys(_OF_SCHEDULED_PROFILES, why)
    if not config.admin_api_key:  # else it may ask for one at any time
        reasons |= dict.fromkeys(_OF_ALL_PROFILES, why)
    return reasons


def _reasons_on_gaudi(config: ServerConfig) -> dict[str, str]:
    reasons = {
        "cuda_graphs": "graphs of a Gaudi card follow ENABLE_HPU_GRAPH and the plan of shapes",
        "cuda_memory_fraction": "use HPU_MEMORY_FRACTION",
    }
    if config.pt_hpu_lazy_mode is False:
        reasons |= dict.fromkeys(
            ("enable_hpu_graph", "limit_hpu_graph", "tgi_graph_reserved_mem"),
            "PT_HPU_LAZY_MODE=0 compiles steps instead of capturing graphs",
        )
    elif not config.enable_hpu_graph:
        reasons |= dict.fromkeys(
            ("limit_hpu_graph", "tgi_graph_reserved_mem"),
            "ENABLE_HPU_GRAPH=false captures no graphs",
        )
    if not config.use_flash_attention:
        reasons["flash_attention_recompute"] = "USE_FLASH_ATTENTION=false turns it off"
    return reasons


def _is_padded(config: ServerConfig, device: str | None = None) -> bool:
    if config.bucketing is not None:
        return config.bucketing
    return (device or device_of(config)) == "hpu"


def device_of(config: ServerConfig) -> str:
    """Where the model will run, as far as can be told without torch."""
    if config.device != "auto":
        return config.device
    if read_driver().gpus:
        return "cuda"
    return "hpu" if shutil.which("hl-smi") else "cpu"
