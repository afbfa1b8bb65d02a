"""What the user asked for, and what follows from it.

Level 0. `ServerConfig` is what was asked, the same struct for the server and for `LLM`; `read_environment` and
`child_environment` are the only readers of the environment; `resolve` is a pure function from the configuration, the
model's size and the device's limits to every number the engine runs with, each with the reason it has that value.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from tgi.errors import ResourceError, StartError
from tgi.types import Limits

DTYPES = ("float32", "float16", "bfloat16")
CHOICES = {
    "dtype": DTYPES,
    "load_format": ("safetensors", "dummy"),
    "quantize": (
        "awq",
        "compressed-tensors",
        "eetq",
        "exl2",
        "gptq",
        "marlin",
        "bitsandbytes",
        "bitsandbytes-nf4",
        "bitsandbytes-fp4",
        "fp8",
    ),
    "kv_cache_dtype": ("fp8_e4m3fn", "fp8_e5m2"),
    "rope_scaling": ("linear", "dynamic"),
    "usage_stats": ("on", "off", "no-stack"),
    "bucket_strategy": ("linear", "exponential"),
}
SECRETS = ("api_key", "admin_api_key", "ngrok_authtoken")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, named as its flag. Children get it as JSON; printing it shows no secret."""

    # model
    model_id: str = "embedded"  # "embedded", a folder, a .gguf file, or a hub id
    revision: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    kv_cache_dtype: str | None = None
    quant_config: str | None = None  # a JSON file that says what to measure, or which measured scales to quantise with
    speculate: int | None = None
    rope_scaling: str | None = None
    rope_factor: float | None = None
    lora_adapters: str | None = None  # see `parse_lora_adapters`
    trust_remote_code: bool = False
    tokenizer_config_path: str | None = None  # replaces the model's tokenizer_config.json
    load_format: str = "safetensors"  # or "dummy": seeded random weights from the config alone
    seed: int = 0  # of dummy weights

    # limits of one request
    max_input_tokens: int | None = None
    max_input_length: int | None = None  # older name of `max_input_tokens`, which takes its value over
    max_total_tokens: int | None = None
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    payload_limit: int = 2_000_000  # bytes of a request body
    max_image_fetch_size: int = 1_073_741_824  # bytes
    disable_grammar_support: bool = False
    ignore_eos_token: bool = False  # in every request
    skip_tokenizer_in_tgi: bool = False  # prompts and answers are token ids between commas
    enable_prefill_logprobs: bool = False
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0

    # batching
    max_concurrent_requests: int = 128
    max_queued_tokens: int | None = None  # prompt tokens that may wait; None: derived
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    prefix_caching: bool = True
    prefill_chunking: bool = True
    overlap: bool = True  # plan the next step while one runs
    queue_threshold_ms: int | None = None  # shorter prompts go first, but not before one that waited this long

    # padded batches
    bucketing: bool | None = None  # None: as the device does
    bucket_strategy: str | None = None  # None: as `vllm_exponential_bucketing` says, or as follows from what is given
    vllm_exponential_bucketing: bool | None = None
    batch_bucket_size: int | None = None  # these three: of the linear strategy; None: 8, 4 and 128
    prefill_batch_bucket_size: int | None = None
    pad_sequence_to_multiple_of: int | None = None  # 0: every prompt is padded to the longest
    vllm_prompt_bs_bucket_min: int | None = None  # ranges of the linear strategy, number of sizes (limit) of the other
    vllm_prompt_bs_bucket_step: int | None = None
    vllm_prompt_bs_bucket_max: int | None = None
    vllm_prompt_bs_bucket_limit: int | None = None
    vllm_prompt_seq_bucket_min: int | None = None
    vllm_prompt_seq_bucket_step: int | None = None
    vllm_prompt_seq_bucket_max: int | None = None
    vllm_prompt_seq_bucket_limit: int | None = None
    vllm_decode_bs_bucket_min: int | None = None
    vllm_decode_bs_bucket_step: int | None = None
    vllm_decode_bs_bucket_max: int | None = None
    vllm_decode_bs_bucket_limit: int | None = None
    vllm_decode_block_bucket_min: int | None = None
    vllm_decode_block_bucket_step: int | None = None
    vllm_decode_block_bucket_max: int | None = None
    vllm_decode_block_bucket_limit: int | None = None
    warmup_enabled: bool = True
    vllm_skip_warmup: bool = False  # like `warmup_enabled` false

    # server
    hostname: str = "0.0.0.0"
    port: int = 3000
    api_key: str | None = None
    admin_api_key: str | None = None  # for what only an administrator may do, such as taking a profile
    cors_allow_origin: list[str] = []  # empty: any
    graceful_termination_timeout: int = 90  # seconds
    validation_workers: int = 2
    compute_type: str | None = None  # of the `x-compute-type` header; None: derived
    aip_http_port: int | None = None  # Vertex AI: listens here instead of on `port`
    aip_predict_route: str | None = None
    aip_health_route: str | None = None

    # hub and files
    huggingface_hub_cache: str | None = None
    weights_cache_override: str | None = None  # a folder whose weights are used instead of the model's
    offline: bool = False
    cache_dir: str = ""  # converted models and compiled kernels; empty: the user's cache folder

    # device
    device: str = "auto"
    num_threads: int | None = None
    custom_kernels: bool = True
    sharded: bool | None = None
    num_shard: int | None = None
    master_addr: str = "localhost"
    master_port: int = 29500
    shard_uds_path: str = "/tmp/text-generation-server"
    cuda_graphs: list[int] | None = None
    cuda_memory_fraction: float = 1.0
    attention: str | None = None

    # Gaudi
    pt_hpu_lazy_mode: bool | None = (
        None  # False: compile ahead of time instead of capturing graphs; None: the software's
    )
    enable_hpu_graph: bool = True
    limit_hpu_graph: bool | None = None  # prompts run outside graphs; None: on Gaudi
    use_flash_attention: bool = True
    flash_attention_recompute: bool = True
    hpu_memory_fraction: float = 0.8  # of the memory free after loading; the rest is never given away
    tgi_graph_reserved_mem: float = 0.1  # share of that for graphs
    vllm_fp32_softmax: bool | None = None  # False: decode attention in the model's type

    # profiler
    prof_waitstep: int = 0
    prof_warmupstep: int = 0
    prof_step: int = 0  # 0: no profile at start
    prof_path: str = "/tmp/hpu_profile"
    prof_ranks: list[int] = msgspec.field(default_factory=lambda: [0])
    prof_record_shapes: bool = False

    # observability
    log_level: str = "info"  # or a filter such as "error,text_generation_router=debug"
    json_output: bool = False
    env: bool = False  # log the environment at start
    otlp_endpoint: str | None = None
    otlp_service_name: str = "text-generation-inference.router"
    prometheus_port: int = 9000
    usage_stats: str = "on"
    ngrok: bool = False
    ngrok_authtoken: str | None = None
    ngrok_edge: str | None = None

    def __post_init__(self) -> None:
        if self.max_input_length is not None and self.max_input_tokens is None:
            msgspec.structs.force_setattr(self, "max_input_tokens", self.max_input_length)
            msgspec.structs.force_setattr(self, "max_input_length", None)

    def __repr__(self) -> str:
        return f"ServerConfig({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """What differs from the defaults, with secrets hidden."""
        default = ServerConfig()
        names = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(default, name)]
        return [(name, "***" if name in SECRETS else getattr(self, name)) for name in names]

    def check(self) -> None:
        """Raise `StartError` naming the first setting that makes no sense or that nothing here can do."""
        _check_values(self)
        _check_combinations(self)
        for name, reason in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value is not False and value != 0:
                raise StartError(f"`{name}` is set to {value!r}, which is not supported: {reason}")
        for name, (served, reason) in _SERVED.items():
            value = getattr(self, name)
            if value is not None and value not in served:
                raise StartError(f"`{name}` is set to {value!r}, which is not supported: {reason}")
        if self.num_shard is not None and self.num_shard > 1:
            raise StartError(
                f"`num_shard` is {self.num_shard}, but one process serves the whole model on this device: leave it out"
            )


# What would change the answers if it were ignored. A feature that comes to work takes its line away.
_REFUSED = {
    "speculate": "tokens are generated one at a time",
    "rope_scaling": "positions are scaled as the model's config.json says",
    "rope_factor": "positions are scaled as the model's config.json says",
    "lora_adapters": "merge the adapter into the model first",
    "ngrok": "no tunnel is opened; run one beside the server",
}

# Of these some values work.
_SERVED = {
    "quantize": (
        ("fp8", "compressed-tensors"),
        "use fp8, which quantises any model when it is loaded, or a model that is already in FP8 or a GGUF file, which"
        " need no setting",
    ),
    "kv_cache_dtype": (("fp8_e4m3fn",), "use fp8_e4m3fn, which is as small and more exact"),
}

# The sizes of the linear strategy.
LINEAR_SIZES = ("batch_bucket_size", "prefill_batch_bucket_size", "pad_sequence_to_multiple_of")
# The bounds of padded sizes, by axis.
BUCKET_RANGES = tuple(
    f"vllm_{axis}_bucket_{bound}"
    for axis in ("prompt_bs", "prompt_seq", "decode_bs", "decode_block")
    for bound in ("min", "step", "max", "limit")
)

_POSITIVE = (
    "validation_workers",
    "max_batch_size",
    "max_input_tokens",
    "max_total_tokens",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_concurrent_requests",
    "max_queued_tokens",
    "max_best_of",
    "max_client_batch_size",
    "payload_limit",
    "num_threads",
    "batch_bucket_size",
    "prefill_batch_bucket_size",
    *BUCKET_RANGES,
)
_NOT_NEGATIVE = (
    "pad_sequence_to_multiple_of",
    "queue_threshold_ms",
    "prof_waitstep",
    "prof_warmupstep",
    "prof_step",
    "max_waiting_tokens",
    "waiting_served_ratio",
    "max_stop_sequences",
    "max_top_n_tokens",
    "max_image_fetch_size",
    "graceful_termination_timeout",
    "speculate",
)
_PORTS = ("port", "prometheus_port", "master_port", "aip_http_port")


def _check_values(config: ServerConfig) -> None:
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise StartError(f"`{name}` must be one of {', '.join(choices)}. Given: {value}")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise StartError(f"`{name}` must be > 0")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if value is not None and value < 0:
            raise StartError(f"`{name}` must be >= 0. Given: {value}")
    for name in _PORTS:
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 65535:
            raise StartError(f"`{name}` must be a port, 0 to 65535. Given: {value}")
    if config.num_threads is not None and config.num_threads > 1024:
        raise StartError(f"`num_threads` must be <= 1024. Given: {config.num_threads}")
    if not 0 < config.watermark_gamma < 1:
        raise StartError(f"`watermark_gamma` must be > 0 and < 1. Given: {config.watermark_gamma}")
    for name in ("cuda_memory_fraction", "hpu_memory_fraction"):
        if not 0 < getattr(config, name) <= 1:
            raise StartError(f"`{name}` must be > 0 and <= 1. Given: {getattr(config, name)}")
    if not 0 <= config.tgi_graph_reserved_mem < 1:
        raise StartError(f"`tgi_graph_reserved_mem` must be >= 0 and < 1. Given: {config.tgi_graph_reserved_mem}")
    for name in ("api_key", "admin_api_key"):
        key = getattr(config, name)
        if key is not None and not (key.strip() and key.isascii() and key.isprintable()):
            raise StartError(f"`{name}` must be printable ASCII and not empty: no other text can be sent in a header")
    for name in ("aip_predict_route", "aip_health_route"):
        route = getattr(config, name)
        if route is not None and not route.startswith("/"):
            raise StartError(f"`{name}` must start with '/'. Given: {route}")


def _check_combinations(config: ServerConfig) -> None:
    """What TGI checks of settings given together, in its words."""
    max_input, max_total, batch_total = (
        config.max_input_tokens,
        config.max_total_tokens,
        config.max_batch_total_tokens,
    )
    if max_input is not None and config.max_input_length is not None:
        raise StartError(
            f"Both `max_input_tokens` ({max_input}) and `max_input_length` ({config.max_input_length}) are set. Please"
            " define only `max_input_tokens` as `max_input_length is deprecated for naming consistency."
        )
    if max_input is not None and max_total is not None and max_input >= max_total:
        raise StartError(f"`max_input_tokens`({max_input}) must be < `max_total_tokens`({max_total})")
    for name, value in (
        ("max_total_tokens", max_total),
        ("max_batch_prefill_tokens", config.max_batch_prefill_tokens),
    ):
        if value is not None and batch_total is not None and value > batch_total:
            raise StartError(f"`{name}` must be <= `max_batch_total_tokens`. Given: {value} and {batch_total}")
    if config.num_shard is not None and config.num_shard < 1:
        raise StartError("`num_shard` cannot be < 1")
    if config.sharded and config.num_shard is not None and config.num_shard <= 1:
        raise StartError("`sharded` is true but `num_shard` <= 1")
    if config.quantize == "exl2" and (config.num_shard or 1) > 1:
        raise StartError("Sharding is currently not supported with `exl2` quantization")
    if config.dtype and config.quantize and not config.quantize.startswith("bitsandbytes"):
        raise StartError(
            "Only 1 can be set between `dtype` and `quantize`, as they both decide how goes the final model."
        )
    if config.quant_config and config.quantize:
        raise StartError(
            "`quant_config` and `quantize` both say how matrices are stored: leave one out"
            " (QUANT_CONFIG quantises with measured scales, --quantize fp8 with those of the weights)"
        )
    strategy = {None: None, True: "exponential", False: "linear"}[config.vllm_exponential_bucketing]
    if config.bucket_strategy and strategy and config.bucket_strategy != strategy:
        raise StartError(
            f"`bucket_strategy` is {config.bucket_strategy}, but VLLM_EXPONENTIAL_BUCKETING says {strategy}:"
            " leave one out"
        )
    for axis in ("prompt_bs", "prompt_seq", "decode_bs", "decode_block"):
        least, most = (getattr(config, f"vllm_{axis}_bucket_{bound}") for bound in ("min", "max"))
        if least is not None and most is not None and least > most:
            raise StartError(f"`vllm_{axis}_bucket_min` must be <= `vllm_{axis}_bucket_max`. Given: {least} and {most}")
    if config.ngrok:
        for name in ("authtoken", "edge"):
            if not getattr(config, f"ngrok_{name}"):
                raise StartError(f"`ngrok-{name}` must be set when using ngrok tunneling")
    if config.lora_adapters is not None:
        parse_lora_adapters(config.lora_adapters)


class LoraAdapter(msgspec.Struct, frozen=True):
    """One item of `lora_adapters`."""

    id: str  # what requests name it
    path: str | None = None  # a local folder; None: `id` is on the hub
    revision: str | None = None


def parse_lora_adapters(text: str) -> list[LoraAdapter]:
    """Items between commas: `repo/id`, `repo/id@revision`, `name=/local/path` or `name=/local/path@revision`."""
    adapters: list[LoraAdapter] = []
    for item in (part.strip() for part in text.split(",")):
        if not item:
            continue
        place, _, revision = item.partition("@")
        name, _, path = place.partition("=")
        if item.count("=") > 1 or item.count("@") > 1 or not name or ("=" in item and not path):
            raise StartError(f"Invalid LoRA adapter format: {item}")
        adapters.append(LoraAdapter(name, path or None, revision or None))
    return adapters


# Fields whose variable is not their name in capitals; None: no variable.
_VARIABLES: dict[str, str | None] = {
    "cache_dir": "TGI_CACHE_DIR",
    "device": "TGI_DEVICE",
    "num_threads": "TGI_NUM_THREADS",
    "offline": "HF_HUB_OFFLINE",
    "custom_kernels": "DISABLE_CUSTOM_KERNELS",
    "ignore_eos_token": "TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN",
    "bucket_strategy": "VLLM_BUCKETING_STRATEGY",
    "seed": None,
    "overlap": None,
    "env": None,
}
_SAGEMAKER = {
    "HF_MODEL_ID": "MODEL_ID",
    "HF_MODEL_REVISION": "REVISION",
    "SM_NUM_GPUS": "NUM_SHARD",
    "HF_MODEL_QUANTIZE": "QUANTIZE",
    "HF_MODEL_TRUST_REMOTE_CODE": "TRUST_REMOTE_CODE",
}
# Other names that releases gave to a variable.
ALIASES = {
    "LIMIT_HPU_GRAPHS": "LIMIT_HPU_GRAPH",
    "VLLM_ENABLE_BUCKETING": "BUCKETING",
    "VLLM_GRAPH_RESERVED_MEM": "TGI_GRAPH_RESERVED_MEM",
    "VLLM_PROMPT_QUERY_BUCKET_MIN": "VLLM_PROMPT_SEQ_BUCKET_MIN",
    "VLLM_PROMPT_QUERY_BUCKET_STEP": "VLLM_PROMPT_SEQ_BUCKET_STEP",
    "VLLM_PROMPT_QUERY_BUCKET_MAX": "VLLM_PROMPT_SEQ_BUCKET_MAX",
}
_STRATEGIES = {"lin": "linear", "exp": "exponential"}  # as VLLM_BUCKETING_STRATEGY abbreviates them
_TOKENS = ("HF_API_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def variable_of(field: str) -> str | None:
    """The environment variable that sets a field."""
    return _VARIABLES.get(field, field.upper())


# What an engine without a server reads from the environment.
ENGINE_SETTINGS = frozenset(
    {
        "revision",
        "device",
        "dtype",
        "quantize",
        "kv_cache_dtype",
        "load_format",
        "max_input_tokens",
        "max_total_tokens",
        "max_batch_prefill_tokens",
        "max_batch_total_tokens",
        "max_batch_size",
        "waiting_served_ratio",
        "max_waiting_tokens",
        "prefix_caching",
        "custom_kernels",
        "watermark_gamma",
        "watermark_delta",
        "cache_dir",
        "offline",
        "huggingface_hub_cache",
        "weights_cache_override",
        "cuda_graphs",
        "cuda_memory_fraction",
        "queue_threshold_ms",
        "quant_config",
        "bucketing",
        "bucket_strategy",
        "vllm_exponential_bucketing",
        "batch_bucket_size",
        "prefill_batch_bucket_size",
        "pad_sequence_to_multiple_of",
        *BUCKET_RANGES,
        "warmup_enabled",
        "vllm_skip_warmup",
        "pt_hpu_lazy_mode",
        "enable_hpu_graph",
        "limit_hpu_graph",
        "use_flash_attention",
        "flash_attention_recompute",
        "hpu_memory_fraction",
        "tgi_graph_reserved_mem",
        "vllm_fp32_softmax",
        "prof_waitstep",
        "prof_warmupstep",
        "prof_step",
        "prof_path",
        "prof_ranks",
        "prof_record_shapes",
    }
)


def read_environment(
    environment: Mapping[str, str] | None = None, only: Collection[str] | None = None
) -> dict[str, Any]:
    """`ServerConfig` fields (or only some) given by environment variables. An empty variable counts as not set."""
    environment = _rename_aliases(_map_sagemaker(os.environ if environment is None else environment))
    given: dict[str, Any] = {}
    for field in msgspec.structs.fields(ServerConfig):
        variable = variable_of(field.name) if only is None or field.name in only else None
        text = environment.get(variable) if variable else None
        # Kubernetes sets PROMETHEUS_PORT=tcp://... for a service called prometheus: not meant for us.
        if text and variable and not (field.name in _PORTS and text.startswith("tcp://")):
            shown = "***" if field.name in SECRETS else repr(text)
            given[field.name] = parse_value(field.name, text, f"environment variable {variable}={shown}")
    if "custom_kernels" in given:
        given["custom_kernels"] = not given["custom_kernels"]
    return given


def _map_sagemaker(environment: Mapping[str, str]) -> Mapping[str, str]:
    """On SageMaker the model is named `HF_MODEL_ID` and the server is expected on port 8080."""
    if not environment.get("HF_MODEL_ID") or environment.get("MODEL_ID"):
        return environment
    mapped = {new: environment[old] for old, new in _SAGEMAKER.items() if environment.get(old)}
    if mapped.get("NUM_SHARD") == "0":  # a machine without accelerators
        del mapped["NUM_SHARD"]
    return {**environment, "PORT": "8080", **mapped}


def _rename_aliases(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Variables by the names this program uses. Raises `StartError` when two names of one have different values."""
    renamed = dict(environment)
    for alias, name in ALIASES.items():
        text = environment.get(alias)
        if not text:
            continue
        if environment.get(name, text) not in (text, ""):
            raise StartError(f"{alias}={text!r} and {name}={environment[name]!r} mean the same setting: leave one out")
        renamed[name] = text
    return renamed


def hub_token(environment: Mapping[str, str] | None = None) -> str | None:
    """The access token for the hub; None leaves it to the hub's library to find one on disk."""
    environment = os.environ if environment is None else environment
    return next((environment[name] for name in _TOKENS if environment.get(name)), None)


def child_environment(config: ServerConfig, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for the processes of a server: the hub's settings as its library reads them, and no API key."""
    child = dict(os.environ if environment is None else environment)
    child.pop("API_KEY", None)
    child.pop("ADMIN_API_KEY", None)
    child.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    token = hub_token(child)
    if token:
        child["HF_TOKEN"] = token
    if config.offline:
        child["HF_HUB_OFFLINE"] = "1"
    if config.huggingface_hub_cache:
        child["HF_HUB_CACHE"] = child["HUGGINGFACE_HUB_CACHE"] = config.huggingface_hub_cache
    return child


def parse_value(field: str, text: str, origin: str) -> Any:
    """The value of a field from text. `origin` says in the error where the text came from."""
    kind = _KINDS[field]
    if field == "ignore_eos_token":
        return text == "true"  # TGI's rule, which everybody who sets it relies on
    if field == "bucket_strategy":
        text = _STRATEGIES.get(text, text)
    try:
        return _PARSERS[kind](text)
    except ValueError:
        raise StartError(f"{origin} is not valid: it must be {_EXPECTED[kind]}") from None


def _parse_bool(text: str) -> bool:
    if text.strip().lower() in ("true", "1", "yes", "on"):
        return True
    if text.strip().lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError(text)


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):  # 18 digits: what fits a message
        raise ValueError(text)
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _parse_str(text: str) -> str:
    text.encode()  # an argument that is not UTF-8 cannot be passed on
    return text


def _parse_list(text: str) -> list[str]:
    return [item.strip() for item in _parse_str(text).split(",") if item.strip()]


_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: _parse_str,
    list[str]: _parse_list,
    list[int]: lambda text: [_parse_int(item) for item in _parse_list(text)],
}
_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "UTF-8 text",
    list[str]: "UTF-8 text",
    list[int]: "whole numbers separated by commas",
}
# The type of each field when it is set.
_KINDS: dict[str, Any] = {
    field.name: next((kind for kind in get_args(field.type) if type(None) in get_args(field.type) and kind), field.type)
    for field in msgspec.structs.fields(ServerConfig)
}


def cache_folder(config: ServerConfig, environment: Mapping[str, str] | None = None) -> Path:
    """Where converted models and compiled kernels are kept."""
    environment = os.environ if environment is None else environment
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tgi"


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """What `resolve` must know of a model."""

    max_positions: int  # longest sequence it was made for
    kv_bytes_per_token: int  # on one rank, all layers


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Every derived number, and for each the reason in words."""

    block_size: int
    num_blocks: int  # the padding block included
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_size: int
    reasons: dict[str, str]

    def explain(self) -> list[tuple[str, str]]:
        """Each derived number (or what has no effect) with its reason, for people."""
        values = {**msgspec.structs.asdict(self), "max_batch_total_tokens": (self.num_blocks - 1) * self.block_size}
        return [(f"{name} {values[name]}" if name in values else name, why) for name, why in self.reasons.items()]


LONGEST_PADDED = 4096  # tokens of a request where nobody says otherwise: each further length is a shape to warm up


def uses_buckets(config: ServerConfig, limits: Limits) -> bool:
    """Whether every step is padded to a shape of a plan, so that a prompt is computed whole."""
    return limits.buckets if config.bucketing is None else config.bucketing


def choose_strategy(config: ServerConfig) -> str:
    """As asked, else linear if one of its sizes was given."""
    if config.bucket_strategy is not None:
        return config.bucket_strategy
    if config.vllm_exponential_bucketing is not None:
        return "exponential" if config.vllm_exponential_bucketing else "linear"
    return "linear" if any(getattr(config, name) is not None for name in LINEAR_SIZES) else "exponential"


def resolve(config: ServerConfig, size: ModelSize, limits: Limits, free_bytes: int) -> Resolved:
    """Derive the engine's numbers. `free_bytes` is the memory free on the device once the weights are loaded."""
    config.check()
    reasons: dict[str, str] = {}
    padded = uses_buckets(config, limits)
    batch_size = config.max_batch_size or limits.max_batch_size
    reasons["max_batch_size"] = "as given" if config.max_batch_size else "the device's default"
    longest = size.max_positions
    reasons["max_total_tokens"] = "positions of the model"
    if padded and longest > LONGEST_PADDED:
        longest = LONGEST_PADDED
        reasons["max_total_tokens"] = "the default where batches are padded"
    if config.max_total_tokens:
        longest = config.max_total_tokens
        reasons["max_total_tokens"] = "as given"
        if longest > size.max_positions:
            raise StartError(
                f"`max_total_tokens` must be <= {size.max_positions}, the positions of the model. Given: {longest}"
            )
    if longest < 2:
        raise StartError(f"`max_total_tokens` must be >= 2. Given: {longest}")
    if padded and not config.max_batch_size and config.max_batch_total_tokens:
        batch_size = max(1, config.max_batch_total_tokens // longest)
        reasons["max_batch_size"] = "max_batch_total_tokens / max_total_tokens"
    useful = batch_size * (-(-longest // limits.block_size) + 1) * limits.block_size  # each request has one to spare
    num_tokens = _pool_tokens(config, size, limits, free_bytes, useful, reasons)
    num_blocks = max(1, num_tokens // limits.block_size)
    pool_tokens = num_blocks * limits.block_size
    if pool_tokens < longest:
        if config.max_total_tokens and config.max_batch_total_tokens:
            raise StartError(
                "`max_total_tokens` must be <= `max_batch_total_tokens`."
                f" Given: {config.max_total_tokens} and {config.max_batch_total_tokens}"
            )
        if config.max_total_tokens:
            raise ResourceError(
                f"Not enough memory to handle `max_total_tokens={longest}`: the KV cache has room for {pool_tokens}"
                f" tokens ({_gigabytes(free_bytes)} free). Lower `max_total_tokens` or free memory."
            )
        longest = pool_tokens
        reasons["max_total_tokens"] = "tokens in the KV cache"
    max_input = config.max_input_tokens or longest - 1
    reasons["max_input_tokens"] = "as given" if config.max_input_tokens else "max_total_tokens - 1"
    if max_input >= longest:
        raise StartError(f"`max_input_tokens`({max_input}) must be < `max_total_tokens`({longest})")
    prefill = config.max_batch_prefill_tokens or min(limits.max_batch_prefill_tokens, pool_tokens)
    reasons["max_batch_prefill_tokens"] = "as given" if config.max_batch_prefill_tokens else "the device's default"
    whole = padded or not limits.mixes_phases  # prompts are not computed in parts
    if padded and not config.max_batch_prefill_tokens and prefill < max_input:
        prefill = max_input
        reasons["max_batch_prefill_tokens"] = "max_input_tokens"
    if whole and prefill < max_input:
        raise StartError(f"`max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: {prefill} and {max_input}")
    if limits.mixes_phases:
        reasons["waiting_served_ratio, max_waiting_tokens"] = "no effect: prefill and decode share a step here"
    return Resolved(
        block_size=limits.block_size,
        num_blocks=num_blocks + 1,
        max_input_tokens=max_input,
        max_total_tokens=longest,
        max_batch_prefill_tokens=prefill,
        max_batch_size=batch_size,
        reasons=reasons,
    )


def _pool_tokens(
    config: ServerConfig, size: ModelSize, limits: Limits, free_bytes: int, useful: int, reasons: dict[str, str]
) -> int:
    """Tokens the KV cache holds: as given, else what memory allows, at most what a full batch can use."""
    affordable = int(free_bytes * limits.memory_share) // size.kv_bytes_per_token
    if config.max_batch_total_tokens:
        needed = config.max_batch_total_tokens * size.kv_bytes_per_token
        if needed > free_bytes:
            raise ResourceError(
                f"Not enough memory for a KV cache of `max_batch_total_tokens={config.max_batch_total_tokens}`: it"
                f" needs {_gigabytes(needed)}, {_gigabytes(free_bytes)} are free."
                f" At most {free_bytes // size.kv_bytes_per_token} tokens fit."
            )
        reasons["max_batch_total_tokens"] = "as given"
        return -(-config.max_batch_total_tokens // limits.block_size) * limits.block_size
    if affordable < limits.block_size:
        raise ResourceError(
            f"Not enough memory for a KV cache: {_gigabytes(free_bytes)} are free once the weights are loaded, and one"
            f" token takes {size.kv_bytes_per_token:,} bytes. Free memory or use a smaller model."
        )
    if useful <= affordable:
        reasons["max_batch_total_tokens"] = "max_batch_size x max_total_tokens, in blocks"
        return -(-useful // limits.block_size) * limits.block_size
    reasons["max_batch_total_tokens"] = f"{limits.memory_share:.0%} of the {_gigabytes(free_bytes)} of memory free"
    return affordable


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
