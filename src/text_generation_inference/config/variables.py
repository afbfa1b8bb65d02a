"""The variables of TGI, on Gaudi above all, that are no settings: who else reads each, or why it has no effect.

Those that are settings stand on the fields of `ServerConfig`.
"""

from collections.abc import Iterator, Mapping

from text_generation_inference.config.settings import ALIASES, SETTINGS, variable_of

# Read for the hub's library, or by it. One is a secret, so none is logged.
OF_THE_HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN", "HF_HOME", "HF_HUB_OFFLINE")

# Passed on unchanged to the software of the card, its quantiser, its container or the hub's library.
PASSED_ON: dict[str, list[str]] = {
    "Gaudi's PyTorch": [
        "PT_HPU_ENABLE_LAZY_COLLECTIVES",
        "PT_HPU_WEIGHT_SHARING",
        "PT_HPUGRAPH_DISABLE_TENSOR_CACHE",
        "PT_HPUGRAPH_ENABLE_DRY_RUN",
        "PT_HPU_RECIPE_CACHE_CONFIG",
        "PT_COMPILE_ONLY_MODE",
        "PT_HPU_MAX_COMPOUND_OP_SIZE",
        "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES",
        "PT_HPU_LAZY_ACC_PAR_MODE",
        "PT_HPU_METRICS_GC_DETAILS",
        "PT_HPU_ENABLE_CACHE_METRICS",
        "PT_ENABLE_INT64_SUPPORT",
        "ENABLE_EXPERIMENTAL_FLAGS",
        "USE_DEFAULT_QUANT_PARAM",
        "UPDATE_GRAPH_OUTPUT_MME",
        "ENABLE_CALC_DYNAMIC_RANGE",
        "UPDATE_MME_OUTPUT_PRECISION_FILTER",
        "EXPERIMENTAL_WEIGHT_SHARING",
        "GRAPH_VISUALIZATION",
        "ENABLE_CONSOLE",
        "LOG_LEVEL_ALL",
        "LOG_LEVEL_PT_FALLBACK",
        "HABANA_PROFILE",
    ],
    "the driver and the container": [
        "HABANA_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "HLS_MODULE_ID",
        "OMPI_MCA_btl_vader_single_copy_mechanism",
    ],
}

# Set by torchrun and by launchers that speak its words; see `cluster`.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

_OWN_PLAN = "shapes follow the two strategies"
_OWN_QUANTISER = "scales are measured and read by this program itself"
_OWN_ATTENTION = "attention is chosen by USE_FLASH_ATTENTION"
_ALL_EXPERTS = "the experts of a rank are computed all at once, up to software 1.20 by 64"
_OWN_COMPILER = "what is compiled is chosen by PT_HPU_LAZY_MODE"

# Variables that change nothing on any device, and why.
WITHOUT_EFFECT: dict[str, str] = {
    "TGI_WIGGLE_ROOM": "--max-batch-total-tokens sets the size of the KV cache",
    "REQUEST_LOGPROBS": "use --enable-prefill-logprobs",
    "XPU_MEMORY_FRACTION": "no such device is used",
    "HF_HUB_ENABLE_HF_TRANSFER": "the hub's library chooses the fastest way itself",
    "LOG_COLORIZE": "logs are coloured on a terminal only",
    "EXLLAMA_VERSION": "no such kernels are used",
    "DISABLE_EXLLAMA": "no such kernels are used",
    "USE_CUTLASS_W8A8": "no such kernels are used",
    "BATCH_SIZE_EXPONENT_BASE": "use VLLM_BUCKETING_STRATEGY=exp, whose sizes grow by factors of about two",
    "MAX_EXPERTS_PER_SLICE": _ALL_EXPERTS,
    "SDP_ON_BF16": "TGI reads it and does nothing with it",
    "DUMP_STACK": "clients are told errors in words, never a stack of calls",
    "DBG_TRACE_FILENAME": "take a trace with PROF_STEP",
    "USE_INC": "the forms of both toolkits are read alike",
    "DEEPSPEED_USE_HABANA_FRAMEWORKS_DETERMINISTIC_API": "DeepSpeed is not used",
    "INC_TARGET_DEVICE": _OWN_QUANTISER,
    "RUNTIME_SCALE_PATCHING": _OWN_QUANTISER,
    "MEASUREMENT_DUMP_METHOD": _OWN_QUANTISER,
    "SCALE_METHOD_CONFIG_DUMP_PATH": _OWN_QUANTISER,
    "CALC_SCALE_WITH_CGUID": _OWN_QUANTISER,
    "CALC_ROUNDING_WITH_CGUID": _OWN_QUANTISER,
    "LOG_LEVEL_INC": _OWN_QUANTISER,
    "VLLM_DYNAMIC_KV_QUANT": "use --kv-cache-dtype fp8_e4m3fn",
    "VLLM_GRAPH_PROMPT_RATIO": "graphs are captured from the smallest on, while there is memory",
    "VLLM_PROMPT_USE_FUSEDSDPA": _OWN_ATTENTION,
    "VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT": "the rescaling of blocks is part of the step's graph",
    "VLLM_PROMPT_USE_FLEX_ATTENTION": _OWN_ATTENTION,
    "VLLM_PROFILER_ENABLED": "take a trace with PROF_STEP",
    "VLLM_USE_FAKE_HPU": "use --device cpu with BUCKETING=true",
    "VLLM_BUCKETING_FROM_FILE": _OWN_PLAN,
    "VLLM_FULL_WARMUP": "the metrics count every shape that was not warmed up",
    "VLLM_T_COMPILE_{FULLGRAPH,DYNAMIC_SHAPES,REGIONAL_COMPILATION}": _OWN_COMPILER,
    "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION{,_ALL}": "the metrics and the log tell of every shape that was not warmed up",
    "VLLM_HPU_LOG_STEP_CPU_FALLBACKS{,_ALL}": "use LOG_LEVEL_PT_FALLBACK=1",
    "VLLM_DEFRAG_THRESHOLD": "blocks that lie far apart are read by their list, so they need not be moved",
    "VLLM_DEFRAG_WITH_GRAPHS": "blocks that lie far apart are read by their list, so they need not be moved",
    "VLLM_CONFIG_HIDDEN_LAYERS": "layers are launched one by one, or all in one graph",
    "VLLM_MOE_CHUNK": _ALL_EXPERTS,
    "VLLM_MOE_TOKEN_BOUNDARY": _ALL_EXPERTS,
    "VLLM_WORKER_MULTIPROC_METHOD": "processes are always started afresh",
    "VLLM_{PROMPT,DECODE}_{BS,QUERY,SEQ,CTX,BLOCK}_BUCKET_{PAD_MAX,PAD_PERCENT}": _OWN_PLAN,
    "VLLM_PROMPT_BLOCK_BUCKET_{MIN,STEP,MAX}": "use VLLM_PROMPT_CTX_BUCKET_{MIN,STEP,MAX}",
    "VLLM_DECODE_{QUERY,SEQ}_BUCKET_{MIN,STEP,MAX}": "a decode step has one token of each request",
    "VLLM_DECODE_CTX_BUCKET_{MIN,STEP,MAX}": "use VLLM_DECODE_BLOCK_BUCKET_{MIN,STEP,MAX}",
}


def expand(name: str) -> Iterator[str]:
    """The names that one with alternatives in braces stands for."""
    head, brace, rest = name.partition("{")
    if not brace:
        yield name
        return
    choices, _, tail = rest.partition("}")
    for choice in choices.split(","):
        yield from expand(head + choice + tail)


NO_EFFECT = {name: reason for pattern, reason in WITHOUT_EFFECT.items() for name in expand(pattern)}


def setting_names() -> list[str]:
    """The variables that a start logs, and their other names."""
    told = [name for name, setting in SETTINGS.items() if setting.told or (setting.flag is None and setting.help)]
    names = [variable for name in told if (variable := variable_of(name))]
    return names + [alias for alias, name in ALIASES.items() if name in names]


def list_given(environment: Mapping[str, str]) -> list[str]:
    """`NAME=value` for each variable of these tables that is set, in their order. None of them is a secret."""
    known = [*setting_names(), *OF_TORCHRUN, *(name for names in PASSED_ON.values() for name in names), *NO_EFFECT]
    return [f"{name}={environment[name]}" for name in dict.fromkeys(known) if environment.get(name)]
