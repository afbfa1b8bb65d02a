"""The launcher's command line: every flag and variable of the reference, what is refused and in which words."""

import os
import re
import socket
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from text_generation_inference.config import SETTINGS, ServerConfig, flag_of, variable_of
from text_generation_inference.config.effects import explain
from text_generation_inference.config.variables import setting_names
from text_generation_inference.errors import StartError
from text_generation_inference.launch.arguments import Launch, build_parser, read_arguments, sections
from text_generation_inference.runner.shapes import BucketPlan, CapturedShapes, describe_plan

# flag, environment variable, text, field, value. An empty text: a switch.
TABLE: list[tuple[str, str, str, str, Any]] = [
    ("--model-id", "MODEL_ID", "org/model", "model_id", "org/model"),
    ("--revision", "REVISION", "refs/pr/7", "revision", "refs/pr/7"),
    ("--validation-workers", "VALIDATION_WORKERS", "3", "validation_workers", 3),
    ("--sharded", "SHARDED", "false", "sharded", False),
    ("--num-shard", "NUM_SHARD", "1", "num_shard", 1),
    ("--num-replicas", "NUM_REPLICAS", "3", "num_replicas", 3),
    ("--dtype", "DTYPE", "bfloat16", "dtype", "bfloat16"),
    ("--trust-remote-code", "TRUST_REMOTE_CODE", "", "trust_remote_code", True),
    ("--max-concurrent-requests", "MAX_CONCURRENT_REQUESTS", "9", "max_concurrent_requests", 9),
    ("--max-best-of", "MAX_BEST_OF", "3", "max_best_of", 3),
    ("--max-stop-sequences", "MAX_STOP_SEQUENCES", "0", "max_stop_sequences", 0),
    ("--max-top-n-tokens", "MAX_TOP_N_TOKENS", "7", "max_top_n_tokens", 7),
    ("--max-input-tokens", "MAX_INPUT_TOKENS", "100", "max_input_tokens", 100),
    ("--max-input-length", "MAX_INPUT_LENGTH", "100", "max_input_tokens", 100),
    ("--max-total-tokens", "MAX_TOTAL_TOKENS", "200", "max_total_tokens", 200),
    ("--waiting-served-ratio", "WAITING_SERVED_RATIO", "1.2", "waiting_served_ratio", 1.2),
    ("--max-batch-prefill-tokens", "MAX_BATCH_PREFILL_TOKENS", "512", "max_batch_prefill_tokens", 512),
    ("--max-batch-total-tokens", "MAX_BATCH_TOTAL_TOKENS", "9000", "max_batch_total_tokens", 9000),
    ("--max-step-ms", "MAX_STEP_MS", "100", "max_step_ms", 100),
    ("--max-waiting-tokens", "MAX_WAITING_TOKENS", "5", "max_waiting_tokens", 5),
    ("--max-batch-size", "MAX_BATCH_SIZE", "8", "max_batch_size", 8),
    ("--cuda-graphs", "CUDA_GRAPHS", "1,2, 4", "cuda_graphs", [1, 2, 4]),
    ("--hostname", "HOSTNAME", "127.0.0.2", "hostname", "127.0.0.2"),
    ("--port", "PORT", "8080", "port", 8080),
    ("-p", "PORT", "8080", "port", 8080),
    ("--prometheus-port", "PROMETHEUS_PORT", "9001", "prometheus_port", 9001),
    ("--shard-uds-path", "SHARD_UDS_PATH", "/tmp/x", "shard_uds_path", "/tmp/x"),
    ("--master-addr", "MASTER_ADDR", "host", "master_addr", "host"),
    ("--master-port", "MASTER_PORT", "29501", "master_port", 29501),
    ("--huggingface-hub-cache", "HUGGINGFACE_HUB_CACHE", "/data", "huggingface_hub_cache", "/data"),
    ("--weights-cache-override", "WEIGHTS_CACHE_OVERRIDE", "/w", "weights_cache_override", "/w"),
    ("--disable-custom-kernels", "DISABLE_CUSTOM_KERNELS", "", "custom_kernels", False),
    ("--cuda-memory-fraction", "CUDA_MEMORY_FRACTION", "0.5", "cuda_memory_fraction", 0.5),
    ("--json-output", "JSON_OUTPUT", "", "json_output", True),
    ("--otlp-endpoint", "OTLP_ENDPOINT", "http://a:4317", "otlp_endpoint", "http://a:4317"),
    ("--otlp-service-name", "OTLP_SERVICE_NAME", "me", "otlp_service_name", "me"),
    ("--ollama-api", "OLLAMA_API", "", "ollama_api", True),
    ("--cors-allow-origin", "CORS_ALLOW_ORIGIN", "http://a,http://b", "cors_allow_origin", ["http://a", "http://b"]),
    ("--api-key", "API_KEY", "secret", "api_key", "secret"),
    ("--cache-salt-by-key", "CACHE_SALT_BY_KEY", "", "cache_salt_by_key", True),
    ("--responses-store", "RESPONSES_STORE", "7", "responses_store", 7),
    ("--hide-cached-tokens", "HIDE_CACHED_TOKENS", "", "hide_cached_tokens", True),
    ("--client-header", "CLIENT_HEADER", "x-forwarded-for", "client_header", "x-forwarded-for"),
    ("--watermark-gamma", "WATERMARK_GAMMA", "0.25", "watermark_gamma", 0.25),
    ("--watermark-delta", "WATERMARK_DELTA", "1.5", "watermark_delta", 1.5),
    ("--ngrok-authtoken", "NGROK_AUTHTOKEN", "t", "ngrok_authtoken", "t"),
    ("--ngrok-edge", "NGROK_EDGE", "e", "ngrok_edge", "e"),
    ("--tokenizer-config-path", "TOKENIZER_CONFIG_PATH", "/t.json", "tokenizer_config_path", "/t.json"),
    ("--disable-grammar-support", "DISABLE_GRAMMAR_SUPPORT", "", "disable_grammar_support", True),
    ("--reasoning-format", "REASONING_FORMAT", "none", "reasoning_format", "none"),
    ("--env", "", "", "env", True),
    ("-e", "", "", "env", True),
    ("--max-client-batch-size", "MAX_CLIENT_BATCH_SIZE", "6", "max_client_batch_size", 6),
    ("--usage-stats", "USAGE_STATS", "no-stack", "usage_stats", "no-stack"),
    ("--payload-limit", "PAYLOAD_LIMIT", "1000", "payload_limit", 1000),
    ("--enable-prefill-logprobs", "ENABLE_PREFILL_LOGPROBS", "", "enable_prefill_logprobs", True),
    ("--graceful-termination-timeout", "GRACEFUL_TERMINATION_TIMEOUT", "5", "graceful_termination_timeout", 5),
    ("-g", "GRACEFUL_TERMINATION_TIMEOUT", "5", "graceful_termination_timeout", 5),
    # ours
    ("--device", "TGI_DEVICE", "cpu", "device", "cpu"),
    ("--load-format", "LOAD_FORMAT", "dummy", "load_format", "dummy"),
    ("--num-threads", "TGI_NUM_THREADS", "2", "num_threads", 2),
    ("--max-queued-tokens", "MAX_QUEUED_TOKENS", "5000", "max_queued_tokens", 5000),
    ("--max-connections", "MAX_CONNECTIONS", "500", "max_connections", 500),
    ("--no-prefix-caching", "", "", "prefix_caching", False),
    ("--cache-dir", "TGI_CACHE_DIR", "/c", "cache_dir", "/c"),
    ("--step-timeout-s", "STEP_TIMEOUT_S", "2.5", "step_timeout_s", 2.5),
    ("--request-timeout-s", "REQUEST_TIMEOUT_S", "30", "request_timeout_s", 30.0),
    ("--bucketing", "BUCKETING", "true", "bucketing", True),
    ("--bucket-strategy", "VLLM_BUCKETING_STRATEGY", "linear", "bucket_strategy", "linear"),
    ("--quant-config", "QUANT_CONFIG", "q.json", "quant_config", "q.json"),
    ("--admin-api-key", "ADMIN_API_KEY", "secret", "admin_api_key", "secret"),
    ("--expert-parallel", "EXPERT_PARALLEL", "", "expert_parallel", True),
    ("--rank-token", "RANK_TOKEN", "secret", "rank_token", "secret"),
    (
        "--allowed-media-domains",
        "ALLOWED_MEDIA_DOMAINS",
        "a.example,b.example",
        "allowed_media_domains",
        ["a.example", "b.example"],
    ),
    ("--allow-private-media", "ALLOW_PRIVATE_MEDIA", "", "allow_private_media", True),
    ("--no-media-urls", "", "", "media_urls", False),
    ("--max-image-fetch-size", "MAX_IMAGE_FETCH_SIZE", "100", "max_image_fetch_size", 100),
    ("--image-fetch-timeout", "IMAGE_FETCH_TIMEOUT", "2.5", "image_fetch_timeout", 2.5),
    ("--max-image-pixels", "MAX_IMAGE_PIXELS", "1000", "max_image_pixels", 1000),
    ("--max-images-per-request", "MAX_IMAGES_PER_REQUEST", "0", "max_images_per_request", 0),
    ("--image-workers", "IMAGE_WORKERS", "3", "image_workers", 3),
]
# Flags that are understood and refused: flag, environment variable, text, start of the error.
REFUSED = [
    ("--quantize", "QUANTIZE", "exl2", "`quantize` is set to 'exl2', which is not supported"),
    ("--speculate", "SPECULATE", "3", "`speculate` is set to 3, which is not supported"),
    ("--kv-cache-dtype", "KV_CACHE_DTYPE", "fp8_e5m2", "`kv_cache_dtype` is set to 'fp8_e5m2', which is not supp"),
    ("--rope-scaling", "ROPE_SCALING", "dynamic", "`rope_scaling` is set to 'dynamic', which is not supported"),
    ("--rope-factor", "ROPE_FACTOR", "2.0", "`rope_factor` is set to 2.0, which is not supported"),
    ("--lora-adapters", "LORA_ADAPTERS", "org/a", "`lora_adapters` is set to 'org/a', which is not supported"),
    ("--ngrok", "NGROK", "", "`ngrok-authtoken` must be set when using ngrok tunneling"),
    ("--nnodes", "NNODES", "2", "`master_addr` must be the address of machine 0"),
    ("--node-rank", "NODE_RANK", "1", "`node_rank` must be < `nnodes`. Given: 1 and 1"),
]
VARIABLES_ONLY = [
    ("HF_HUB_OFFLINE", "1", "offline", True),
    ("PREFIX_CACHING", "0", "prefix_caching", False),
    ("PREFIX_CACHING", "true", "prefix_caching", True),
    ("PREFILL_CHUNKING", "0", "prefill_chunking", False),
    ("ATTENTION", "paged", "attention", "paged"),
    ("LOG_LEVEL", "debug", "log_level", "debug"),
    ("COMPUTE_TYPE", "4-a10g", "compute_type", "4-a10g"),
    ("MEDIA_URLS", "0", "media_urls", False),
    ("AIP_HTTP_PORT", "8081", "aip_http_port", 8081),
    ("AIP_PREDICT_ROUTE", "/p", "aip_predict_route", "/p"),
    ("AIP_HEALTH_ROUTE", "/h", "aip_health_route", "/h"),
    ("DISABLE_CUSTOM_KERNELS", "false", "custom_kernels", True),
]


# Set by variables of other names: see test_gaudi_environment.py.
OTHERS = {"ignore_eos_token"}


def read(*arguments: str, **environment: str) -> Launch:
    return read_arguments(build_parser("launcher", "").parse_args(arguments), environment)


def error_of(*arguments: str, **environment: str) -> str:
    with pytest.raises(StartError) as caught:
        read(*arguments, **environment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("flag", "variable", "text", "field", "value"), TABLE, ids=[row[0] for row in TABLE])
def test_flag_and_variable(flag: str, variable: str, text: str, field: str, value: Any) -> None:
    by_flag = read(flag, *([text] if text else [])).config
    assert getattr(by_flag, field) == value != getattr(ServerConfig(), field)
    assert msgspec.json.decode(msgspec.json.encode(by_flag), type=ServerConfig) == by_flag
    if variable:
        by_variable = read(**{variable: text or "true"}).config
        assert by_variable == by_flag
        assert read(flag, *([text] if text else []), **{variable: "12" if text.isdecimal() else text}).config == by_flag


@pytest.mark.parametrize(("variable", "text", "field", "value"), VARIABLES_ONLY)
def test_variable_without_flag(variable: str, text: str, field: str, value: Any) -> None:
    assert getattr(read(**{variable: text}).config, field) == value


@pytest.mark.parametrize(("flag", "variable", "text", "error"), REFUSED)
def test_what_would_change_answers_is_refused(flag: str, variable: str, text: str, error: str) -> None:
    for given in (error_of(flag, *([text] if text else [])), error_of(**{variable: text or "1"})):
        assert given.startswith(f"Invalid argument: {error}")


def test_tables_hold_every_flag() -> None:
    with_flag = {name: flag for name in SETTINGS if (flag := flag_of(name))}
    flags = set(with_flag.values())
    assert flags == {row[0] for row in [*TABLE, *REFUSED] if row[0].startswith("--")}
    # Every setting can be set from outside, but for those that only tests and `LLM` need.
    fields = {*with_flag, *(row[2] for row in VARIABLES_ONLY)}
    fields |= {name.lower() for name in setting_names()}
    assert set(ServerConfig.__struct_fields__) - fields == {"seed", "overlap", "picture_folder", *OTHERS}


def test_defaults_of_the_reference() -> None:
    config = read().config
    expected = {
        "model_id": "embedded",
        "validation_workers": 2,
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_top_n_tokens": 5,
        "waiting_served_ratio": 0.3,
        "max_waiting_tokens": 20,
        "hostname": "0.0.0.0",
        "port": 3000,
        "prometheus_port": 9000,
        "shard_uds_path": "/tmp/text-generation-server",
        "master_addr": "localhost",
        "master_port": 29500,
        "cuda_memory_fraction": 1.0,
        "otlp_service_name": "text-generation-inference.router",
        "max_client_batch_size": 4,
        "usage_stats": "on",
        "graceful_termination_timeout": 90,
        "max_image_fetch_size": 1073741824,
        "watermark_gamma": 0.5,
        "watermark_delta": 2.0,
        "num_shard": 1,
        "nnodes": 1,
        "hpu_memory_fraction": 0.8,
        "tgi_graph_reserved_mem": 0.1,
        "prof_path": "/tmp/hpu_profile",
        "prof_ranks": [0],
    }
    assert {name: getattr(config, name) for name in expected} == expected
    others = {"cors_allow_origin": [], "log_level": "info", "load_format": "safetensors", "device": "auto"}
    others["max_step_ms"] = 250
    others["num_replicas"] = 1
    others["responses_store"] = 1000
    others["reasoning_format"] = "auto"
    others |= {"image_fetch_timeout": 20.0, "max_image_pixels": 1 << 26, "max_images_per_request": 32}
    switches = (
        "prefix_caching",
        "prefill_chunking",
        "custom_kernels",
        "overlap",
        "picture_folder",
        "warmup_enabled",
        "media_urls",
    )
    gaudi = ("enable_hpu_graph", "use_flash_attention", "flash_attention_recompute")
    others |= dict.fromkeys((*switches, *gaudi), True)
    for name in set(ServerConfig.__struct_fields__) - expected.keys():
        assert getattr(config, name) == others.get(name) or not getattr(config, name), name
    assert read().notes == []


def test_flag_beats_variable_beats_default() -> None:
    assert read("--port", "1", PORT="2").config.port == 1
    assert read(PORT="2").config.port == 2
    assert read("--port", "1", PORT="nonsense").config.port == 1  # what is overridden is not even read
    assert read("--no-prefix-caching", PREFIX_CACHING="1").config.prefix_caching is False
    assert read("--port", "1", "--port", "2").config.port == 2
    assert read(PORT="").config.port == 3000


def test_repeated_origins() -> None:
    config = read(
        "--cors-allow-origin", "http://a", "--cors-allow-origin", "http://b", CORS_ALLOW_ORIGIN="http://c"
    ).config
    assert config.cors_allow_origin == ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            "--max-input-tokens 5 --max-input-length 6",
            "Both `max_input_tokens` (5) and `max_input_length` (6) are set. Please define only `max_input_tokens` as "
            "`max_input_length is deprecated for naming consistency.",
        ),
        ("--max-input-tokens 9 --max-total-tokens 9", "`max_input_tokens`(9) must be < `max_total_tokens`(9)"),
        ("--max-input-length 9 --max-total-tokens 8", "`max_input_tokens`(9) must be < `max_total_tokens`(8)"),
        ("--validation-workers 0", "`validation_workers` must be > 0"),
        ("--max-batch-size 0", "`max_batch_size` must be > 0"),
        (
            "--max-total-tokens 9 --max-batch-total-tokens 8",
            "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 9 and 8",
        ),
        (
            "--max-batch-prefill-tokens 9 --max-batch-total-tokens 8",
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 9 and 8",
        ),
        ("--ngrok", "`ngrok-authtoken` must be set when using ngrok tunneling"),
        ("--ngrok --ngrok-authtoken t", "`ngrok-edge` must be set when using ngrok tunneling"),
        ("--lora-adapters a,b=c=d", "Invalid LoRA adapter format: b=c=d"),
        ("--lora-adapters a@b@c", "Invalid LoRA adapter format: a@b@c"),
        ("--sharded true --num-shard 1", "`sharded` is true but `num_shard` <= 1"),
        ("--num-shard 0", "`num_shard` cannot be < 1"),
        ("--quantize exl2 --num-shard 2", "Sharding is currently not supported with `exl2` quantization"),
        (
            "--quantize gptq --dtype float16",
            "Only 1 can be set between `dtype` and `quantize`, as they both decide how goes the final model.",
        ),
    ],
)
def test_errors_in_the_words_of_the_reference(arguments: str, error: str) -> None:
    assert error_of(*arguments.split()) == f"Invalid argument: {error}"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--port x", "--port 'x' is not valid: it must be a whole number"),
        ("--port 1e3", "--port '1e3' is not valid: it must be a whole number"),
        ("--port 1_0", "--port '1_0' is not valid: it must be a whole number"),
        (f"--port {'9' * 40}", "is not valid: it must be a whole number"),
        ("--port 65536", "`port` must be a port, 0 to 65535. Given: 65536"),
        ("--port -1", "`port` must be a port, 0 to 65535. Given: -1"),
        ("--max-stop-sequences -1", "`max_stop_sequences` must be >= 0. Given: -1"),
        ("--sharded maybe", "--sharded 'maybe' is not valid: it must be true or false"),
        ("--sharded", "--sharded: expected one argument (see launcher --help)"),
        ("--waiting-served-ratio nan", "--waiting-served-ratio 'nan' is not valid: it must be a number"),
        ("--cuda-graphs 1,x", "--cuda-graphs '1,x' is not valid: it must be whole numbers separated by commas"),
        ("--cuda-memory-fraction 2", "`cuda_memory_fraction` must be > 0 and <= 1. Given: 2.0"),
        ("--dtype int3", "`dtype` must be one of float32, float16, bfloat16. Given: int3"),
        ("--quantize int3", "`quantize` must be one of awq, compressed-tensors,"),
        ("--usage-stats maybe", "`usage_stats` must be one of on, off, no-stack. Given: maybe"),
        ("--frob", "unrecognized arguments: --frob (see launcher --help)"),
        ("--max-batch", "unrecognized arguments: --max-batch"),  # no abbreviations
        ("org/model", "unrecognized arguments: org/model"),
        ("--sharded true", "not enough cuda devices: `sharded` is true but only found 0 CUDA devices"),
        ("--sharded true --device cpu", "; on a CPU say with `num_shard` how many ranks there are"),
        ("--max-concurrent-requests 0", "`max_concurrent_requests` must be > 0"),
        ("--max-queued-tokens 0", "`max_queued_tokens` must be > 0"),
        ("--max-connections 0", "`max_connections` must be > 0"),
    ],
)
def test_bad_values_are_named(arguments: str, error: str) -> None:
    assert error in error_of(*arguments.split())


def test_bad_variables_are_named() -> None:
    assert error_of(MAX_BATCH_SIZE="many") == (
        "environment variable MAX_BATCH_SIZE='many' is not valid: it must be a whole number"
    )
    assert "JSON_OUTPUT='maybe' is not valid: it must be true or false" in error_of(JSON_OUTPUT="maybe")
    assert "`aip_predict_route` must start with '/'" in error_of(AIP_PREDICT_ROUTE="predict")


def test_text_that_is_no_text() -> None:
    assert error_of("--revision", "\udcff").endswith("is not valid: it must be UTF-8 text")


def test_what_has_no_effect_says_so() -> None:
    notes = read("--cuda-graphs", "0", "--prometheus-port", "9100", "--validation-workers", "4").notes
    assert notes == [
        "--prometheus-port has no effect: nothing is served there; /metrics is on the main port",
        "--cuda-graphs has no effect: the CPU captures no graphs",
    ]
    notes = read(USAGE_STATS="on", ATTENTION="paged", PREFILL_CHUNKING="0", USE_FLASH_ATTENTION="false").notes
    assert [note.partition(" has no effect: ")[0] for note in notes] == [
        "--usage-stats",
        "ATTENTION",
        "PREFILL_CHUNKING",
        "USE_FLASH_ATTENTION",
    ]
    # What asks for what is done anyway needs no word.
    assert read(USAGE_STATS="off", PREFILL_CHUNKING="1", TRUST_REMOTE_CODE="false", SPECULATE="0").notes == []
    assert explain(ServerConfig(trust_remote_code=True), ["trust_remote_code"], lambda: "cpu") == []


def test_nothing_is_said_of_what_nobody_set() -> None:
    assert read().notes == []
    assert describe_plan(ServerConfig(), CapturedShapes(), 0) == []
    (note,) = describe_plan(ServerConfig(bucketing=True), BucketPlan([], []), 0)
    assert note.startswith("bucket plan, ")


def test_hostname() -> None:
    launch = read(HOSTNAME="3f2a9c1b77aa")
    assert launch.config.hostname == "0.0.0.0"
    assert launch.notes == ["Invalid hostname, defaulting to 0.0.0.0: '3f2a9c1b77aa' is not an IP address"]
    own_name = socket.gethostname()  # a container has it in the environment: nobody set anything
    launch = read(HOSTNAME=own_name)
    assert launch.config.hostname == "0.0.0.0" and launch.notes == []
    assert len(read("--hostname", own_name).notes) == 1
    assert read("--hostname", "::1").config.hostname == "::1"
    assert read("--hostname", "localhost").config.hostname == "127.0.0.1"


def test_clouds() -> None:
    config = read(
        HF_MODEL_ID="org/model", HF_MODEL_REVISION="v2", SM_NUM_GPUS="1", HF_MODEL_TRUST_REMOTE_CODE="true"
    ).config
    assert (config.model_id, config.revision, config.num_shard, config.port) == ("org/model", "v2", 1, 8080)
    assert config.trust_remote_code
    assert read("--port", "1", HF_MODEL_ID="org/model", SM_NUM_GPUS="0").config.port == 1
    assert "`quantize` is set to 'exl2'" in error_of(HF_MODEL_ID="org/model", HF_MODEL_QUANTIZE="exl2")
    named = read(HF_MODEL_ID="org/other", MODEL_ID="org/model", HF_MODEL_REVISION="v2").config
    assert (named.model_id, named.revision, named.port) == ("org/model", None, 3000)
    assert read(AIP_HTTP_PORT="8081", PORT="80").config.port == 8081
    assert read("--port", "1", AIP_HTTP_PORT="8081").config.port == 1


def test_services_of_kubernetes_are_no_ports() -> None:
    assert read(PROMETHEUS_PORT="tcp://10.0.0.1:9090").config.prometheus_port == 9000


def test_secrets_are_not_shown() -> None:
    launch = read("--api-key", "geheim", NGROK_AUTHTOKEN="heimlich")
    assert "geheim" not in repr(launch) and "heimlich" not in repr(launch) and "api_key='***'" in repr(launch)
    for error in (error_of("--api-key", "geheim\udcff"), error_of(API_KEY="geheim\n"), error_of("--api-key", "")):
        assert "geheim" not in error


# -- as a user has it: processes of their own ----------------------------------------------------------------------


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # None in sys.modules makes every import of that name fail: none of this may need torch.
    program = "import sys; sys.modules['torch'] = None; from {0} import main; sys.exit(main({1!r}))"
    module, *arguments = command
    return subprocess.run(
        [sys.executable, "-c", program.format(module, arguments)],
        env={**{name: text for name, text in os.environ.items() if name != "HOSTNAME"}, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "command", [["text_generation_inference.launch.command"], ["text_generation_inference.cli", "serve"]]
)
def test_help_lists_every_flag_default_and_variable(command: list[str]) -> None:
    done = run(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for flag, variable, *_ in [*TABLE, *REFUSED]:
        assert re.search(rf"(?<!\S){re.escape(flag)}[ ,]", text), flag
        assert not variable or f"env: {variable}]" in text, variable
    for name in ("max_best_of", "port", "otlp_service_name"):
        default = str(getattr(ServerConfig(), name))
        assert f"[default: {default}; env: {variable_of(name)}]" in text.replace("text- ", "text-")
    for group in (*sections(with_flags=True), *sections(with_flags=False)):
        assert f"{group}:" in done.stdout


@pytest.mark.parametrize(
    "command", [["text_generation_inference.launch.command"], ["text_generation_inference.cli", "serve"]]
)
def test_exit_codes(command: list[str]) -> None:
    assert re.fullmatch(r"(text-generation-launcher|tgi serve) \S+\n", run(*command, "-V").stdout)
    for arguments, environment in (
        (["--port", "x"], {}),
        (["--frob"], {}),
        (["--num-shard", "0"], {}),
        ([], {"MAX_INPUT_TOKENS": "-3"}),
    ):
        done = run(*command, *arguments, **environment)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
