"""What the user asked for: every setting, with all that is said of it, and what makes no sense or cannot be done.

First of `config`. A setting is one field of `ServerConfig`: its type, its default, and a `Setting` from which flag,
variable, help, range and reasons follow. Reads nothing; knows neither models nor devices.
"""

from functools import partial
from typing import Annotated, Any, get_args, get_origin

import msgspec

from text_generation_inference.config.combinations import check_combinations
from text_generation_inference.config.setting import (
    Setting,
    check_hosts,
    check_key,
    check_name,
    check_port,
    check_route,
    check_sizes,
)

DTYPES = ("float32", "float16", "bfloat16")
_METHODS = (
    *("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin"),
    *("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"),
)

_model = partial(Setting, section="model")
_request = partial(Setting, section="limits of a request")
_pictures = partial(Setting, section="pictures")
_batching = partial(Setting, section="batching")
_server = partial(Setting, section="server")
_hub = partial(Setting, section="hub")
_device = partial(Setting, section="device")
_ranks = partial(Setting, section="ranks")
_observed = partial(Setting, section="observability")
_accepted = partial(
    Setting, section="accepted for compatibility (each is refused or has no effect, and says so at start)"
)
_variable = partial(Setting, flag=None)
_of_tgi = partial(_variable, section="variables: without a flag, of every TGI")
_texts = partial(_variable, section="variables: text and queue, on every device")
_padding = partial(
    _variable, section="variables: padded batches (on by default on Gaudi; BUCKETING=true elsewhere)", engine=True
)
_gaudi = partial(_variable, section="variables: Gaudi", only_on="hpu", engine=True)
_profiler = partial(_variable, section="variables: profiler")
_AXES = "VLLM_{PROMPT_BS,PROMPT_SEQ,PROMPT_CTX,DECODE_BS,DECODE_BLOCK}_BUCKET_"
_axis = partial(_padding, "lin: range of an axis", "N", listed=_AXES + "{MIN,STEP,MAX}", above=0)
_Axis = Annotated[int | None, _axis()]
_NumSizes = Annotated[int | None, _padding("exp: number of sizes on an axis", "N", listed=_AXES + "LIMIT", above=0)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, named as its flag. Children get it as JSON; printing it shows no secret."""

    # model
    model_id: Annotated[
        str,
        _model("embedded, a model folder, a .gguf file, or a model on the Hugging Face hub", "MODEL", check=check_name),
    ] = "embedded"
    revision: Annotated[
        str | None,
        _model("commit, branch, tag or refs/pr/N on the hub", "NAME", default="main", check=check_name, engine=True),
    ] = None
    dtype: Annotated[
        str | None,
        _model("type of the weights on the device", "TYPE", default="the device's best", choices=DTYPES, engine=True),
    ] = None
    quantize: Annotated[
        str | None,
        _model(
            "put plain matrices into FP8 (fp8), 8 bits (eetq, bitsandbytes) or 4 (bitsandbytes-nf4, -fp4) on loading;"
            " others only check what the checkpoint is",
            "METHOD",
            default="as the checkpoint is",
            choices=_METHODS,
            served=tuple(name for name in _METHODS if name != "exl2"),
            refused="use a GPTQ, AWQ or GGUF version of the model, which need no setting, or the unquantised model with"
            " bitsandbytes-nf4 or fp8, which quantise any model when it is loaded",
            engine=True,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _model(
            "fp8_e4m3fn: keys and values in FP8",
            "TYPE",
            default="the model's",
            choices=("fp8_e4m3fn", "fp8_e5m2"),
            served=("fp8_e4m3fn",),
            refused="use fp8_e4m3fn, which is as small and more exact",
            engine=True,
        ),
    ] = None
    quant_config: Annotated[
        str | None,
        _model(
            "JSON file: what to measure, or the measured scales to serve in FP8 with",
            "FILE",
            told=True,
            check=check_name,
            engine=True,
        ),
    ] = None
    load_format: Annotated[
        str,
        _model("dummy: random weights from config.json alone", "FORMAT", choices=("safetensors", "dummy"), engine=True),
    ] = "safetensors"
    tokenizer_config_path: Annotated[
        str | None, _model("a file that replaces the model's tokenizer_config.json", "FILE", check=check_name)
    ] = None
    weights_cache_override: Annotated[
        str | None,
        _model(
            "take the .safetensors files of this folder instead of the model's", "DIR", check=check_name, engine=True
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, _model("run modelling code that comes with a model whose architecture nobody else has")
    ] = False
    disable_grammar_support: Annotated[bool, _model("refuse requests with a grammar")] = False
    reasoning_format: Annotated[
        str, _model("tell a model's thoughts from its chat answers, or not", "FORMAT", choices=("auto", "none"))
    ] = "auto"
    watermark_gamma: Annotated[
        float, _model("share of the vocabulary that a watermark prefers", "X", above=0, below=1, engine=True)
    ] = 0.5
    watermark_delta: Annotated[float, _model("how strongly a watermark prefers it", "X", engine=True)] = 2.0

    # limits of a request
    max_input_tokens: Annotated[
        int | None, _request("longest prompt", "N", default="max-total-tokens - 1", above=0, engine=True)
    ] = None
    # `max_input_tokens` takes its value over.
    max_input_length: Annotated[int | None, _request("older name of --max-input-tokens", "N")] = None
    max_total_tokens: Annotated[
        int | None,
        _request("longest prompt and answer together", "N", default="from the model and memory", above=0, engine=True),
    ] = None
    max_best_of: Annotated[int, _request("most candidates of best_of", "N", above=0)] = 2
    max_stop_sequences: Annotated[int, _request("most stop sequences", "N", least=0)] = 4
    max_top_n_tokens: Annotated[int, _request("most alternatives reported for a token", "N", least=0)] = 5
    max_client_batch_size: Annotated[
        int,
        _request(
            "told by /info alone: no native route takes several prompts",
            "N",
            above=0,
            no_effect="/v1/completions takes as many prompts as --max-concurrent-requests lets run",
        ),
    ] = 4
    payload_limit: Annotated[
        int | None,
        _request("bytes of a request body", "N", default="2000000; 32000000 where the model sees pictures", above=0),
    ] = None
    enable_prefill_logprobs: Annotated[bool, _request("allow decoder_input_details: the logprobs of a prompt")] = False

    # pictures
    allowed_media_domains: Annotated[
        list[str] | None,
        _pictures(
            "the only hosts that pictures are fetched from: exact names, separated by commas",
            "LIST",
            default="any public host",
            check=check_hosts,
        ),
    ] = None
    allow_private_media: Annotated[
        bool, _pictures("fetch pictures from private, link-local and loopback addresses too")
    ] = False
    media_urls: Annotated[
        bool, _pictures("fetch nothing: pictures come as data alone", flag="--no-media-urls", turns_off=True)
    ] = True
    max_image_fetch_size: Annotated[
        int, _pictures("bytes of a picture; never more than 4 for each pixel it may have", "N", least=0)
    ] = 1_073_741_824
    image_fetch_timeout: Annotated[
        float, _pictures("seconds for fetching a picture, redirects included", "SECONDS", above=0)
    ] = 20.0
    max_image_pixels: Annotated[
        int, _pictures("width times height of a picture, checked before it is decoded", "N", above=0, most=2**30)
    ] = 67_108_864
    max_images_per_request: Annotated[int, _pictures("pictures in a prompt", "N", least=0)] = 32
    image_workers: Annotated[
        int | None,
        _pictures("processes that decode pictures", "N", default="half of the cores, 2 to 4", above=0, most=256),
    ] = None

    # batching
    max_concurrent_requests: Annotated[
        int, _batching("requests in the server; more are answered with status 429", "N", above=0)
    ] = 128
    max_queued_tokens: Annotated[
        int | None, _batching("prompt tokens that may wait; beyond, status 429", "N", default="derived", above=0)
    ] = None
    max_batch_prefill_tokens: Annotated[
        int | None, _batching("prompt tokens computed in a step", "N", default="the device's", above=0, engine=True)
    ] = None
    max_batch_total_tokens: Annotated[
        int | None, _batching("tokens in the KV cache", "N", default="from memory", above=0, engine=True)
    ] = None
    max_batch_size: Annotated[
        int | None, _batching("requests computed at a time", "N", default="the device's", above=0, engine=True)
    ] = None
    max_step_ms: Annotated[
        int,
        _batching(
            "longest step with prompts beside running requests: their chunks follow it; 0: any",
            "N",
            least=0,
            engine=True,
        ),
    ] = 250
    waiting_served_ratio: Annotated[
        float, _batching("waiting to running, from which on prompts interrupt decoding", "X", least=0, engine=True)
    ] = 0.3
    max_waiting_tokens: Annotated[
        int, _batching("decode steps after which waiting prompts interrupt anyway", "N", least=0, engine=True)
    ] = 20
    bucketing: Annotated[
        bool | None,
        _batching(
            "pad every step to a shape that was warmed up",
            "true|false",
            default="on Gaudi",
            told=True,
            aliases=("VLLM_ENABLE_BUCKETING",),
            engine=True,
        ),
    ] = None  # None: as the device does
    bucket_strategy: Annotated[
        str | None,
        _batching(
            "its shapes: linear or exponential",
            "NAME",
            default="see BATCH_BUCKET_SIZE below",
            told=True,
            spellings={"lin": "linear", "exp": "exponential"},
            variable="VLLM_BUCKETING_STRATEGY",
            choices=("linear", "exponential"),
            engine=True,
        ),
    ] = None  # None: as `vllm_exponential_bucketing` says, or as follows from what is given
    prefix_caching: Annotated[
        bool, _batching("compute every prompt in full", flag="--no-prefix-caching", turns_off=True, engine=True)
    ] = True

    # server
    hostname: Annotated[str, _server("IP address to listen on; what is no address counts as 0.0.0.0", "ADDRESS")] = (
        "0.0.0.0"
    )
    port: Annotated[int, _server("port to listen on", "PORT", short="-p", check=check_port)] = 3000
    api_key: Annotated[
        str | None,
        _server(
            "key that clients must send as a bearer token",
            "KEY",
            default="no key is asked for",
            check=check_key,
            secret=True,
        ),
    ] = None
    admin_api_key: Annotated[
        str | None,
        _server("key for what only an administrator may do", "KEY", default="nobody may", check=check_key, secret=True),
    ] = None
    cors_allow_origin: Annotated[
        list[str], _server("origin that browsers may call from (repeatable)", "ORIGIN", default="any")
    ] = []
    cache_salt_by_key: Annotated[
        bool, _server("share cached prefixes and pictures only between requests with the same API key")
    ] = False
    ollama_api: Annotated[bool, _server("serve Ollama's API too, under /api")] = False
    responses_store: Annotated[
        int, _server("responses of /v1/responses that can be continued by their id; 0: none", "N", least=0)
    ] = 1000
    hide_cached_tokens: Annotated[bool, _server("do not tell in `usage` how many prompt tokens were cached")] = False
    client_header: Annotated[
        str | None,
        _server(
            "header in which a proxy names the client", "NAME", default="the connection's address", check=check_name
        ),
    ] = None  # a proxy's header that names the client; None: clients are told by their address
    max_connections: Annotated[
        int | None, _server("connections open at a time; beyond, status 503", "N", default="derived", above=0)
    ] = None  # open at a time; None: as many as descriptors allow, up to 16,384
    validation_workers: Annotated[int, _server("threads that check and tokenise requests", "N", above=0)] = 2
    graceful_termination_timeout: Annotated[
        int, _server("seconds for requests to end after SIGTERM", "SECONDS", short="-g", least=0)
    ] = 90
    request_timeout_s: Annotated[
        float | None, _server("seconds after which a request ends with status 504", "SECONDS", default="none", above=0)
    ] = None
    step_timeout_s: Annotated[
        float | None, _server("seconds after which a step counts as hung", "SECONDS", default="the device's", above=0)
    ] = None  # a step that takes longer hangs: the engine is started again; None: derived

    # hub and files
    huggingface_hub_cache: Annotated[
        str | None,
        _hub("folder of downloaded models", "DIR", default="the hub library's", check=check_name, engine=True),
    ] = None
    cache_dir: Annotated[
        str,
        _hub(
            "folder of converted models and compiled kernels",
            "DIR",
            default="~/.cache/tgi",
            variable="TGI_CACHE_DIR",
            check=check_name,
            engine=True,
        ),
    ] = ""

    # device
    device: Annotated[
        str,
        _device(
            "auto (a GPU or a Gaudi card if there is one), cpu, cuda or hpu", "NAME", variable="TGI_DEVICE", engine=True
        ),
    ] = "auto"
    num_threads: Annotated[
        int | None, _device("CPU threads", "N", default="all cores", variable="TGI_NUM_THREADS", above=0, most=1024)
    ] = None
    cuda_graphs: Annotated[
        list[int] | None,
        _device(
            "batch sizes to capture, separated by commas; 0: none",
            "LIST",
            default="the device's",
            check=check_sizes,
            only_on="cuda",
            elsewhere="the {device} captures no graphs",
            engine=True,
        ),
    ] = None
    cuda_memory_fraction: Annotated[
        float,
        _device(
            "share of the GPU's memory to use",
            "X",
            above=0,
            most=1,
            only_on="cuda",
            elsewhere="the model runs on the {device}; --max-batch-total-tokens limits the KV cache",
            engine=True,
        ),
    ] = 1.0
    custom_kernels: Annotated[
        bool,
        _device(
            "torch's own ops only",
            flag="--disable-custom-kernels",
            turns_off=True,
            variable="DISABLE_CUSTOM_KERNELS",
            negated=True,
            engine=True,
        ),
    ] = True

    # ranks
    sharded: Annotated[
        bool | None, _ranks("split the model over the devices that are there", "true|false", default="by --num-shard")
    ] = None
    num_shard: Annotated[
        int | None,
        _ranks("devices to split it over, those of all machines together", "N", default="CUDA_VISIBLE_DEVICES, else 1"),
    ] = None  # a number once a command line is read
    expert_parallel: Annotated[
        bool,
        _ranks("each rank has whole experts, not a part of each", aliases=("USE_EXPERT_PARALLEL",), engine=True),
    ] = False
    num_replicas: Annotated[
        int, _ranks("engines that serve the model side by side, each with devices of its own", "N", least=1, most=256)
    ] = 1
    nnodes: Annotated[int, _ranks("machines that serve the model together", "N", least=1)] = 1
    node_rank: Annotated[int, _ranks("which of them this is: 0 is the one with the API", "N", least=0)] = 0
    master_addr: Annotated[str, _ranks("address of machine 0, where the others meet it", "HOST")] = "localhost"
    master_port: Annotated[int, _ranks("port there", "PORT", check=check_port)] = 29500
    rank_token: Annotated[
        str | None, _ranks("secret that machines know each other by", "TOKEN", secret=True, check=check_key)
    ] = None

    # observability
    json_output: Annotated[bool, _observed("logs as JSON lines")] = False
    env: Annotated[bool, _observed("log the versions of what runs", short="-e", variable=None)] = False
    otlp_endpoint: Annotated[str | None, _observed("OTLP gRPC collector of traces", "URL", default="no traces")] = None
    otlp_service_name: Annotated[str, _observed("name of the service in traces", "NAME")] = (
        "text-generation-inference.router"
    )

    # refused or without effect
    speculate: Annotated[
        int | None, _accepted("speculative tokens per step", "N", least=0, refused="tokens are generated one at a time")
    ] = None
    rope_scaling: Annotated[
        str | None,
        _accepted(
            "linear or dynamic",
            "KIND",
            choices=("linear", "dynamic"),
            refused="positions are scaled as the model's config.json says",
        ),
    ] = None
    rope_factor: Annotated[
        float | None,
        _accepted("factor of --rope-scaling", "X", refused="positions are scaled as the model's config.json says"),
    ] = None
    lora_adapters: Annotated[
        str | None,
        _accepted(
            "repo/id, repo/id@revision or name=/path, separated by commas",
            "LIST",
            refused="merge the adapter into the model first",
        ),
    ] = None  # see `parse_lora_adapters`
    shard_uds_path: Annotated[
        str, _accepted("prefix of unix sockets", "PATH", no_effect="processes talk over sockets in a private folder")
    ] = "/tmp/text-generation-server"
    prometheus_port: Annotated[
        int,
        _accepted(
            "a second port for metrics",
            "PORT",
            check=check_port,
            no_effect="nothing is served there; /metrics is on the main port",
        ),
    ] = 9000
    usage_stats: Annotated[
        str,
        _accepted(
            "on, off or no-stack",
            "LEVEL",
            choices=("on", "off", "no-stack"),
            no_effect="nothing is ever sent",
            as_it_is="off",
        ),
    ] = "on"
    ngrok: Annotated[bool, _accepted("open a tunnel", refused="no tunnel is opened; run one beside the server")] = False
    ngrok_authtoken: Annotated[
        str | None, _accepted("token of the tunnel", "TOKEN", secret=True, no_effect="no tunnel is opened")
    ] = None
    ngrok_edge: Annotated[str | None, _accepted("edge of the tunnel", "EDGE", no_effect="no tunnel is opened")] = None

    # variables without a flag
    log_level: Annotated[str, _of_tgi("error, warn, info or debug", "LEVEL")] = (
        "info"  # or a filter such as "error,text_generation_router=debug"
    )
    attention: Annotated[
        str | None,
        _of_tgi(
            "flashinfer: prompts run its kernels on a GPU; others have no effect",
            "NAME",
            no_effect="the device has one kind of attention",
            engine=True,
        ),
    ] = None
    prefill_chunking: Annotated[
        bool,
        _of_tgi(
            "no effect: long prompts are always computed in parts",
            "0|1",
            no_effect="long prompts are always computed in parts",
            as_it_is=True,
        ),
    ] = True

    # texts and queue
    ignore_eos_token: Annotated[
        bool,
        _texts(
            "nothing but length and stop sequences ends an answer",
            "true",
            variable="TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN",
        ),
    ] = False  # in every request
    skip_tokenizer_in_tgi: Annotated[
        bool, _texts("prompts and answers are token ids between commas; `?` pads", "true|false")
    ] = False
    queue_threshold_ms: Annotated[
        int | None,
        _texts(
            "shorter prompts first, but those that waited longer before all",
            "N",
            default="as they come",
            least=0,
            engine=True,
        ),
    ] = None

    # padded batches
    vllm_exponential_bucketing: Annotated[bool | None, _padding("true: exp, false: lin", "true|false")] = None
    batch_bucket_size: Annotated[
        int | None, _padding("lin: decode batches are multiples of it", "N", default="8", above=0)
    ] = None
    prefill_batch_bucket_size: Annotated[
        int | None, _padding("lin: batches of prompts are multiples of it", "N", default="4", above=0)
    ] = None
    pad_sequence_to_multiple_of: Annotated[
        int | None, _padding("lin: lengths of prompts; 0: all as the longest", "N", default="128", least=0)
    ] = None
    base_image_tokens: Annotated[
        int | None,
        _padding("models that see: shortest length that prompts are padded to", "N", default="as others", above=0),
    ] = None
    vllm_prompt_bs_bucket_min: _Axis = None
    vllm_prompt_bs_bucket_step: _Axis = None
    vllm_prompt_bs_bucket_max: _Axis = None
    vllm_prompt_seq_bucket_min: Annotated[int | None, _axis(aliases=("VLLM_PROMPT_QUERY_BUCKET_MIN",))] = None
    vllm_prompt_seq_bucket_step: Annotated[int | None, _axis(aliases=("VLLM_PROMPT_QUERY_BUCKET_STEP",))] = None
    vllm_prompt_seq_bucket_max: Annotated[int | None, _axis(aliases=("VLLM_PROMPT_QUERY_BUCKET_MAX",))] = None
    vllm_prompt_ctx_bucket_min: _Axis = None
    vllm_prompt_ctx_bucket_step: _Axis = None
    vllm_prompt_ctx_bucket_max: _Axis = None
    vllm_decode_bs_bucket_min: _Axis = None
    vllm_decode_bs_bucket_step: _Axis = None
    vllm_decode_bs_bucket_max: _Axis = None
    vllm_decode_block_bucket_min: _Axis = None
    vllm_decode_block_bucket_step: _Axis = None
    vllm_decode_block_bucket_max: _Axis = None
    vllm_prompt_bs_bucket_limit: _NumSizes = None
    vllm_prompt_seq_bucket_limit: _NumSizes = None
    vllm_prompt_ctx_bucket_limit: _NumSizes = None
    vllm_decode_bs_bucket_limit: _NumSizes = None
    vllm_decode_block_bucket_limit: _NumSizes = None
    warmup_enabled: Annotated[
        bool, _padding("compute every shape before the first request", "true|false", as_it_is=True)
    ] = True
    vllm_skip_warmup: Annotated[bool, _padding("the opposite", "true|false", as_it_is=False)] = (
        False  # like `warmup_enabled` false
    )

    # Gaudi
    pt_hpu_lazy_mode: Annotated[
        bool | None, _gaudi("1: graphs; 0: eager, compiled by torch.compile", "0|1", default="the software's")
    ] = None
    enable_hpu_graph: Annotated[bool, _gaudi("capture steps as graphs", "true|false")] = True
    limit_hpu_graph: Annotated[
        bool | None,
        _gaudi("decode steps alone, to save memory", "true|false", default="true", aliases=("LIMIT_HPU_GRAPHS",)),
    ] = None  # prompts run outside graphs; None: on Gaudi
    use_flash_attention: Annotated[
        bool, _gaudi("fused attention for prompts", "true|false", elsewhere="the device has one kind of attention")
    ] = True
    flash_attention_recompute: Annotated[
        bool,
        _gaudi("its variant that takes less memory", "true|false", elsewhere="the device has one kind of attention"),
    ] = True
    hpu_memory_fraction: Annotated[
        float, _gaudi("share of the memory free after loading that may be used", "X", above=0, most=1)
    ] = 0.8  # of the memory free after loading; the rest is never given away
    tgi_graph_reserved_mem: Annotated[
        float, _gaudi("share of that for graphs", "X", least=0, below=1, aliases=("VLLM_GRAPH_RESERVED_MEM",))
    ] = 0.1
    vllm_fp32_softmax: Annotated[
        bool | None, _gaudi("decode attention keeps its scores in float32", "true|false", default="true")
    ] = None  # False: decode attention in the model's type
    vllm_contiguous_pa: Annotated[
        bool | None,
        _gaudi(
            "decode attention reads the first blocks of the cache in place; takes graphs of its own",
            "true|false",
            default="true without prefix caching",
            elsewhere="the device reads blocks where they are",
        ),
    ] = None

    # profiler
    prof_step: Annotated[
        int, _profiler("steps of a torch.profiler trace taken from the start on", "N", default="0: none", least=0)
    ] = 0
    prof_waitstep: Annotated[int, _profiler("steps before it", "N", least=0)] = 0
    prof_warmupstep: Annotated[int, _profiler("steps to warm the profiler up", "N", least=0)] = 0
    prof_path: Annotated[str, _profiler("folder of traces", "DIR")] = "/tmp/hpu_profile"
    prof_ranks: Annotated[list[int], _profiler("ranks to profile", "LIST", default="0")] = msgspec.field(
        default_factory=lambda: [0]
    )
    prof_record_shapes: Annotated[bool, _profiler("record the shapes of tensors", "true|false")] = False

    # not in the help
    seed: Annotated[int, _variable(variable=None)] = 0  # of dummy weights
    picture_folder: Annotated[str | None, _variable(variable=None)] = None  # where pixels of pictures are
    overlap: Annotated[bool, _variable(variable=None)] = True  # plan the next step while one runs
    compute_type: Annotated[str | None, _variable()] = None  # of the `x-compute-type` header; None: derived
    aip_http_port: Annotated[int | None, _variable(check=check_port)] = (
        None  # Vertex AI: listens here instead of on `port`
    )
    aip_predict_route: Annotated[str | None, _variable(check=check_route)] = None
    aip_health_route: Annotated[str | None, _variable(check=check_route)] = None
    offline: Annotated[bool, _variable(variable="HF_HUB_OFFLINE", engine=True)] = False

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
        for name, setting in SETTINGS.items():
            setting.check_value(name, getattr(self, name))
        check_combinations(self)
        for name, setting in SETTINGS.items():
            setting.check_served(name, getattr(self, name))


def plain_type(kind: Any) -> Any:
    """The type of a field when it is set."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return next((part for part in get_args(kind) if type(None) in get_args(kind) and part), kind)


def _setting_of(kind: Any) -> Setting:
    return next(said for said in get_args(kind) if isinstance(said, Setting))


_FIELDS = msgspec.structs.fields(ServerConfig)
SETTINGS: dict[str, Setting] = {field.name: _setting_of(field.type) for field in _FIELDS}
TYPES: dict[str, Any] = {field.name: plain_type(field.type) for field in _FIELDS}

CHOICES = {name: setting.choices for name, setting in SETTINGS.items() if setting.choices}
SECRETS = tuple(name for name, setting in SETTINGS.items() if setting.secret)
# What an engine without a server reads from the environment.
ENGINE_SETTINGS = frozenset(name for name, setting in SETTINGS.items() if setting.engine)
# The sizes of the linear strategy.
LINEAR_SIZES = ("batch_bucket_size", "prefill_batch_bucket_size", "pad_sequence_to_multiple_of")
# The bounds of padded sizes, by axis.
BUCKET_RANGES = tuple(name for name, setting in SETTINGS.items() if setting.listed)


def variable_of(name: str) -> str | None:
    """The environment variable that sets a field."""
    setting = SETTINGS.get(name, Setting())
    return name.upper() if setting.variable == "" else setting.variable


def flag_of(name: str) -> str | None:
    """The flag that sets a field."""
    flag = SETTINGS[name].flag
    return f"--{name.replace('_', '-')}" if flag == "" else flag


# Other names of variables.
ALIASES = {alias: variable_of(name) or "" for name, setting in SETTINGS.items() for alias in setting.aliases}
