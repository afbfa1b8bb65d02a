"""What settings and variables have no effect where a model runs, or exclude each other.

Nothing that somebody set is ignored without a word: it does what it says, is refused, or is explained here.
"""

import importlib.util
from collections.abc import Callable, Collection

from text_generation_inference.config import variables
from text_generation_inference.config.derived import choose_strategy
from text_generation_inference.config.settings import (
    BUCKET_RANGES,
    LINEAR_SIZES,
    SETTINGS,
    ServerConfig,
    flag_of,
    variable_of,
)
from text_generation_inference.errors import StartError

FindDevice = Callable[[], str]  # where the model will run; it may take a moment to find out

_OF_PLANS = ("bucket_strategy", "vllm_exponential_bucketing", *LINEAR_SIZES, *BUCKET_RANGES)
_OF_WARM_UP = ("warmup_enabled", "vllm_skip_warmup")
_OF_SCHEDULED_PROFILES = ("prof_waitstep", "prof_warmupstep", "prof_ranks")
_OF_ALL_PROFILES = ("prof_path", "prof_record_shapes")

_OF_MACHINES = ("node_rank", "master_addr", "master_port", "rank_token")

_SHOWN = {"cpu": "CPU", "cuda": "GPU", "hpu": "Gaudi card"}


def check_given(config: ServerConfig, given: Collection[str], find_device: FindDevice) -> None:
    """Refuse what was asked for in so many words and excludes something else that was."""
    if config.bucketing is False and find_device() == "hpu":
        raise StartError(
            "Invalid argument: `bucketing` is false, but on Gaudi each new shape is compiled while requests wait: leave"
            " it out, or choose larger sizes with BATCH_BUCKET_SIZE and PAD_SEQUENCE_TO_MULTIPLE_OF"
        )
    if (config.num_shard or 1) > 1 and "model_id" not in given and find_device() == "hpu":
        raise StartError(
            f"--model-id is missing: --num-shard {config.num_shard} is for a model that one card cannot hold, and"
            " without it the small embedded one would be served instead. `--model-id embedded` asks for that one"
        )
    if config.vllm_skip_warmup and config.warmup_enabled and "warmup_enabled" in given:
        raise StartError(
            "Invalid argument: WARMUP_ENABLED=true and VLLM_SKIP_WARMUP=true exclude each other: leave one out"
        )


def explain(config: ServerConfig, given: Collection[str], find_device: FindDevice) -> list[str]:
    """One line for each setting or variable in `given` that has no effect, and why."""
    always = {name: setting.no_effect for name, setting in SETTINGS.items() if setting.no_effect}
    reasons = {**always, **_reasons_of_device(config, given, find_device), **variables.NO_EFFECT}
    as_it_is = {name: setting.as_it_is for name, setting in SETTINGS.items()}
    return [
        f"{(flag_of(name) if name in SETTINGS else None) or variable_of(name)} has no effect: {reason}"
        for name, reason in reasons.items()
        if reason and name in given and getattr(config, name, None) != as_it_is.get(name, "")
    ]


def _reasons_of_device(config: ServerConfig, given: Collection[str], find_device: FindDevice) -> dict[str, str]:
    """Settings that have no effect where the model runs, or beside others."""
    of_devices = [name for name, setting in SETTINGS.items() if setting.only_on]
    depending = {"attention", *of_devices, *_OF_PLANS, *_OF_WARM_UP}
    device = find_device() if depending.intersection(given) else "cpu"
    shown = _SHOWN.get(device, device)
    reasons = {
        name: SETTINGS[name].elsewhere.format(device=shown) for name in of_devices if SETTINGS[name].only_on != device
    }
    if device == "hpu":
        reasons |= _reasons_on_gaudi(config)
    if device == "cuda":
        reasons["attention"] = _reason_of_attention(config)
    if not _is_padded(config, lambda: device):
        reasons |= dict.fromkeys((*_OF_PLANS, *_OF_WARM_UP), "batches are not padded; --bucketing true pads them")
    else:
        strategy = choose_strategy(config)
        others = [name for name in BUCKET_RANGES if name.endswith("_limit") == (strategy == "linear")]
        if strategy == "exponential":
            others += LINEAR_SIZES
            others.remove("vllm_decode_block_bucket_step")  # it is read there too
        reasons |= dict.fromkeys(others, f"the strategy is {strategy}")
    return reasons | _reasons_of_profiles(config) | _reasons_of_ranks(config)


def _reasons_of_ranks(config: ServerConfig) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if config.nnodes == 1:
        reasons |= dict.fromkeys(_OF_MACHINES, "one machine serves the model; --nnodes N joins several")
    if (config.num_shard or 1) == 1:
        reasons["expert_parallel"] = "one rank has all experts"
    return reasons


def _reason_of_attention(config: ServerConfig) -> str:
    """Nothing if it has an effect."""
    if config.attention != "flashinfer":
        return "a GPU runs our own kernels, or flashinfer's for prompts with ATTENTION=flashinfer"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install flashinfer-python); our own kernels run, which need nothing"
    return ""


def _reasons_of_profiles(config: ServerConfig) -> dict[str, str]:
    num_ranks = config.num_shard or 1
    if config.prof_step and any(rank < num_ranks for rank in config.prof_ranks):
        return {}
    why = "no profile is taken at start; PROF_STEP=N takes one"
    reasons: dict[str, str] = {}
    if config.prof_step:
        why = "PROF_RANKS names no rank that there is: 0" + (f" to {num_ranks - 1}" if num_ranks > 1 else "")
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
    if not config.enable_hpu_graph:  # without lazy mode nothing is compiled then
        reasons |= dict.fromkeys(
            ("limit_hpu_graph", "tgi_graph_reserved_mem"),
            "ENABLE_HPU_GRAPH=false captures no graphs",
        )
    elif config.pt_hpu_lazy_mode is False:
        reasons |= dict.fromkeys(
            ("enable_hpu_graph", "limit_hpu_graph", "tgi_graph_reserved_mem"),
            "PT_HPU_LAZY_MODE=0 compiles steps instead of capturing graphs",
        )
    if not config.use_flash_attention:
        reasons["flash_attention_recompute"] = "USE_FLASH_ATTENTION=false turns it off"
    return reasons


def _is_padded(config: ServerConfig, find_device: FindDevice) -> bool:
    return find_device() == "hpu" if config.bucketing is None else config.bucketing
