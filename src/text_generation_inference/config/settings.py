"""What the user asked for: every setting with its default, and what makes no sense or cannot be done.

First of `config`. Reads nothing; knows neither models nor devices.
"""

from typing import Any

import msgspec

from text_generation_inference.errors import StartError

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
    max_step_ms: int = 250  # of a step with prompts beside others' decode tokens; 0: as long as it takes
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
    client_header: str | None = None  # a proxy's header that names the client; None: clients are told by their address
    max_connections: int | None = None  # open at a time; None: as many as descriptors allow, up to 16,384
    cache_salt_by_key: bool = False  # cached prefixes are shared only under the same `Authorization`
    hide_cached_tokens: bool = False  # `usage` does not tell how much of a prompt was cached
    step_timeout_s: float | None = None  # a step that takes longer hangs: the engine is started again; None: derived
    request_timeout_s: float | None = None  # a request that takes longer ends with an error
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
    "max_connections",
    "num_threads",
    "step_timeout_s",
    "request_timeout_s",
    "batch_bucket_size",
    "prefill_batch_bucket_size",
    *BUCKET_RANGES,
)
_NOT_NEGATIVE = (
    "pad_sequence_to_multiple_of",
    "queue_threshold_ms",
    "max_step_ms",
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
# Names and paths, which are looked for on disk or on the hub.
_NAMES = (
    "model_id",
    "revision",
    "tokenizer_config_path",
    "huggingface_hub_cache",
    "weights_cache_override",
    "cache_dir",
    "quant_config",
    "client_header",
)
_MAX_NAME, _MAX_PART = 4096, 255  # bytes: the longest path there can be, and the longest name in it
PORTS = ("port", "prometheus_port", "master_port", "aip_http_port")


def _check_name(name: str, value: str | None) -> None:
    if value is None:
        return
    size = len(value.encode(errors="replace"))
    if size > _MAX_NAME:
        raise StartError(f"`{name}` has {size} bytes, and no name or path has more than {_MAX_NAME}")
    longest = max(len(part.encode(errors="replace")) for part in value.split("/"))
    if longest > _MAX_PART:
        raise StartError(f"`{name}` has a name of {longest} bytes in it, and no file has one of more than {_MAX_PART}")
    if any(ord(character) < 32 or character == "\x7f" for character in value):
        raise StartError(f"`{name}` holds control characters, which no name or path has. Given: {value[:60]!r}")


def _check_values(config: ServerConfig) -> None:
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise StartError(f"`{name}` must be one of {', '.join(choices)}. Given: {value}")
    for name in _NAMES:
        _check_name(name, getattr(config, name))
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise StartError(f"`{name}` must be > 0")
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if value is not None and value < 0:
            raise StartError(f"`{name}` must be >= 0. Given: {value}")
    for name in PORTS:
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
    if any(size < 0 for size in config.cuda_graphs or ()):
        raise StartError(f"`cuda_graphs` must be numbers of requests, 0 for none. Given: {config.cuda_graphs}")
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
