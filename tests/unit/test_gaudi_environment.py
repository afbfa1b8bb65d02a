"""Every environment variable of TGI on Gaudi: read with its meaning, passed on, or explained; never ignored silently."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import text_generation_inference
from text_generation_inference.config import (
    ALIASES,
    BUCKET_RANGES,
    SETTINGS,
    ServerConfig,
    child_environment,
    choose_strategy,
    variable_of,
    variables,
)
from text_generation_inference.errors import StartError
from text_generation_inference.launch.arguments import Launch, build_parser, read_arguments

# The names of the reference: sections 1.1 to 1.7, beside those every TGI has.
REFERENCE = [
    "ENABLE_HPU_GRAPH",
    "LIMIT_HPU_GRAPH",
    "BATCH_BUCKET_SIZE",
    "PREFILL_BATCH_BUCKET_SIZE",
    "PAD_SEQUENCE_TO_MULTIPLE_OF",
    "BATCH_SIZE_EXPONENT_BASE",
    "MAX_TOTAL_TOKENS",
    "MAX_BATCH_SIZE",
    "MAX_BATCH_TOTAL_TOKENS",
    "SKIP_TOKENIZER_IN_TGI",
    "WARMUP_ENABLED",
    "VLLM_SKIP_WARMUP",
    "QUEUE_THRESHOLD_MS",
    "USE_FLASH_ATTENTION",
    "FLASH_ATTENTION_RECOMPUTE",
    "BASE_IMAGE_TOKENS",
    "ATTENTION",
    "PREFIX_CACHING",
    "PREFILL_CHUNKING",
    "REQUEST_LOGPROBS",
    "TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN",
    "ROPE_SCALING",
    "ROPE_FACTOR",
    "USE_EXPERT_PARALLEL",
    "MAX_EXPERTS_PER_SLICE",
    "SDP_ON_BF16",
    "DUMP_STACK",
    "DBG_TRACE_FILENAME",
    "GRAPH_VISUALIZATION",
    "LOG_LEVEL",
    "HPU_MEMORY_FRACTION",
    "TGI_GRAPH_RESERVED_MEM",
    "VLLM_GRAPH_PROMPT_RATIO",
    "TGI_WIGGLE_ROOM",
    "CUDA_MEMORY_FRACTION",
    "PROF_WAITSTEP",
    "PROF_WARMUPSTEP",
    "PROF_STEP",
    "PROF_PATH",
    "PROF_RANKS",
    "PROF_RECORD_SHAPES",
    "QUANT_CONFIG",
    "USE_INC",
    "ENABLE_EXPERIMENTAL_FLAGS",
    "USE_DEFAULT_QUANT_PARAM",
    "UPDATE_GRAPH_OUTPUT_MME",
    "ENABLE_CALC_DYNAMIC_RANGE",
    "UPDATE_MME_OUTPUT_PRECISION_FILTER",
    "EXPERIMENTAL_WEIGHT_SHARING",
    "DEEPSPEED_USE_HABANA_FRAMEWORKS_DETERMINISTIC_API",
    "INC_TARGET_DEVICE",
    "RUNTIME_SCALE_PATCHING",
    "MEASUREMENT_DUMP_METHOD",
    "SCALE_METHOD_CONFIG_DUMP_PATH",
    "CALC_SCALE_WITH_CGUID",
    "CALC_ROUNDING_WITH_CGUID",
    "LOG_LEVEL_INC",
    "VLLM_DYNAMIC_KV_QUANT",
    "VLLM_EXPONENTIAL_BUCKETING",
    "VLLM_{PROMPT_BS,PROMPT_SEQ,DECODE_BS,DECODE_BLOCK}_BUCKET_{MIN,STEP,MAX,LIMIT}",
    "VLLM_CONTIGUOUS_PA",
    "VLLM_PROMPT_USE_FUSEDSDPA",
    "VLLM_FP32_SOFTMAX",
    "VLLM_FUSED_BLOCK_SOFTMAX_ADJUSTMENT",
    "VLLM_PROMPT_USE_FLEX_ATTENTION",
    "VLLM_PROFILER_ENABLED",
    "VLLM_USE_FAKE_HPU",
    "VLLM_BUCKETING_STRATEGY",
    "VLLM_BUCKETING_FROM_FILE",
    "VLLM_{PROMPT,DECODE}_{BS,QUERY,CTX,BLOCK}_BUCKET_{MIN,STEP,MAX,PAD_MAX,PAD_PERCENT}",
    "VLLM_GRAPH_RESERVED_MEM",
    "VLLM_ENABLE_BUCKETING",
    "VLLM_FULL_WARMUP",
    "VLLM_T_COMPILE_{FULLGRAPH,DYNAMIC_SHAPES,REGIONAL_COMPILATION}",
    "VLLM_HPU_LOG_STEP_{GRAPH_COMPILATION,CPU_FALLBACKS}{,_ALL}",
    "VLLM_DEFRAG_THRESHOLD",
    "VLLM_DEFRAG_WITH_GRAPHS",
    "VLLM_CONFIG_HIDDEN_LAYERS",
    "VLLM_MOE_CHUNK",
    "VLLM_MOE_TOKEN_BOUNDARY",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "PT_HPU_LAZY_MODE",
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
    "ENABLE_CONSOLE",
    "LOG_LEVEL_ALL",
    "LOG_LEVEL_PT_FALLBACK",
    "HABANA_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "HLS_MODULE_ID",
    "OMPI_MCA_btl_vader_single_copy_mechanism",
    "HABANA_PROFILE",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_HUB_ENABLE_HF_TRANSFER",
    "HF_HOME",
    "HUGGINGFACE_HUB_CACHE",
    "PORT",
    "LIMIT_HPU_GRAPHS",
]
ALL = sorted({name for pattern in REFERENCE for name in variables.expand(pattern)})
SOURCES = Path(text_generation_inference.__file__).parent
PASSED_ON = {name for names in variables.PASSED_ON.values() for name in names}
HUB = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME"}  # read by the hub's library, or for it

# variable, text, field, value
MEANINGS: list[tuple[str, str, str, Any]] = [
    ("ENABLE_HPU_GRAPH", "False", "enable_hpu_graph", False),
    ("LIMIT_HPU_GRAPH", "True", "limit_hpu_graph", True),
    ("LIMIT_HPU_GRAPHS", "false", "limit_hpu_graph", False),
    ("BATCH_BUCKET_SIZE", "32", "batch_bucket_size", 32),
    ("PREFILL_BATCH_BUCKET_SIZE", "2", "prefill_batch_bucket_size", 2),
    ("PAD_SEQUENCE_TO_MULTIPLE_OF", "256", "pad_sequence_to_multiple_of", 256),
    ("PAD_SEQUENCE_TO_MULTIPLE_OF", "0", "pad_sequence_to_multiple_of", 0),
    ("MAX_TOTAL_TOKENS", "2048", "max_total_tokens", 2048),
    ("MAX_BATCH_SIZE", "32", "max_batch_size", 32),
    ("MAX_BATCH_TOTAL_TOKENS", "65536", "max_batch_total_tokens", 65536),
    ("SKIP_TOKENIZER_IN_TGI", "true", "skip_tokenizer_in_tgi", True),
    ("WARMUP_ENABLED", "false", "warmup_enabled", False),
    ("VLLM_SKIP_WARMUP", "true", "vllm_skip_warmup", True),
    ("QUEUE_THRESHOLD_MS", "120", "queue_threshold_ms", 120),
    ("USE_FLASH_ATTENTION", "false", "use_flash_attention", False),
    ("FLASH_ATTENTION_RECOMPUTE", "false", "flash_attention_recompute", False),
    ("TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN", "true", "ignore_eos_token", True),
    ("TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN", "True", "ignore_eos_token", False),
    ("TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN", "1", "ignore_eos_token", False),
    ("HPU_MEMORY_FRACTION", "0.9", "hpu_memory_fraction", 0.9),
    ("TGI_GRAPH_RESERVED_MEM", "0", "tgi_graph_reserved_mem", 0.0),
    ("VLLM_GRAPH_RESERVED_MEM", "0.2", "tgi_graph_reserved_mem", 0.2),
    ("PROF_WAITSTEP", "10", "prof_waitstep", 10),
    ("PROF_WARMUPSTEP", "10", "prof_warmupstep", 10),
    ("PROF_STEP", "1", "prof_step", 1),
    ("PROF_PATH", "/tmp/p", "prof_path", "/tmp/p"),
    ("PROF_RANKS", "0,1", "prof_ranks", [0, 1]),
    ("PROF_RECORD_SHAPES", "True", "prof_record_shapes", True),
    (
        "QUANT_CONFIG",
        "./quantization_config/maxabs_quant.json",
        "quant_config",
        "./quantization_config/maxabs_quant.json",
    ),
    ("VLLM_EXPONENTIAL_BUCKETING", "true", "vllm_exponential_bucketing", True),
    ("VLLM_BUCKETING_STRATEGY", "exp", "bucket_strategy", "exponential"),
    ("VLLM_BUCKETING_STRATEGY", "lin", "bucket_strategy", "linear"),
    ("VLLM_ENABLE_BUCKETING", "true", "bucketing", True),
    ("BUCKETING", "true", "bucketing", True),
    ("VLLM_PROMPT_QUERY_BUCKET_MIN", "64", "vllm_prompt_seq_bucket_min", 64),
    ("VLLM_FP32_SOFTMAX", "true", "vllm_fp32_softmax", True),
    ("VLLM_CONTIGUOUS_PA", "false", "vllm_contiguous_pa", False),
    ("PT_HPU_LAZY_MODE", "0", "pt_hpu_lazy_mode", False),
    ("PT_HPU_LAZY_MODE", "1", "pt_hpu_lazy_mode", True),
    *((name.upper(), "7", name, 7) for name in BUCKET_RANGES),
]


def read(*arguments: str, **environment: str) -> Launch:
    return read_arguments(build_parser("launcher", "").parse_args(arguments), environment)


def error_of(*arguments: str, **environment: str) -> str:
    with pytest.raises(StartError) as caught:
        read(*arguments, **environment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("variable", "text", "field", "value"), MEANINGS)
def test_meaning(variable: str, text: str, field: str, value: Any) -> None:
    config = read("--device", "cpu", **{variable: text}).config
    assert getattr(config, field) == value
    assert msgspec.json.decode(msgspec.json.encode(config), type=ServerConfig) == config  # as the engine gets it


@pytest.mark.parametrize("name", ALL)
def test_every_variable_of_the_reference_is_known(name: str) -> None:
    fields = {variable_of(field) for field in ServerConfig.__struct_fields__}
    without_effect = {variable_of(field) for field, setting in SETTINGS.items() if setting.no_effect}
    explained = {*without_effect, *variables.NO_EFFECT}
    of_ranks = name in variables.OF_TORCHRUN
    known = [name in fields or name in ALIASES, name in explained, name in PASSED_ON, name in HUB, of_ranks]
    assert any(known), name
    assert not (name in PASSED_ON and name in explained), name


def test_a_setting_that_is_not_explained_is_read_somewhere() -> None:
    """A field that nothing but the command line knows would be a promise nobody keeps."""
    words = r"(config|settings)\.[a-z0-9_]+|\"[a-z0-9_]+\""
    left_out = ("--exclude-dir=config", "--exclude=arguments.py")
    command = ["grep", "-rhoE", words, str(SOURCES), "--include=*.py", *left_out]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    read_names = {word.strip('"').rpartition(".")[2] for word in found.split()}
    promised = {field for _, _, field, _ in MEANINGS} - {name.lower() for name in variables.NO_EFFECT}
    through_helpers = {
        *BUCKET_RANGES,
        "vllm_exponential_bucketing",
        "bucket_strategy",
        "vllm_contiguous_pa",
    }  # of `config`
    assert promised - read_names - through_helpers == set()


@pytest.mark.parametrize("name", sorted(variables.NO_EFFECT))
def test_what_has_no_effect_says_so_once(name: str) -> None:
    launch = read("--device", "cpu", **{name: "1"})
    notes = [note for note in launch.notes if note.startswith(f"{name} has no effect: ")]
    assert len(notes) == 1, launch.notes
    assert f"{name}=1" in launch.variables


def test_what_is_set_is_told() -> None:
    launch = read(
        PT_HPU_RECIPE_CACHE_CONFIG="/c,true,64", BATCH_BUCKET_SIZE="4", HF_TOKEN="hf_geheim", API_KEY="geheim"
    )
    assert launch.variables == ["BATCH_BUCKET_SIZE=4", "PT_HPU_RECIPE_CACHE_CONFIG=/c,true,64"]
    assert "geheim" not in repr(launch)
    assert read().variables == []


def test_help_shows_every_variable() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "text_generation_inference.launch.command", "--help"],
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    text = " ".join(done.stdout.split())
    for name, setting in SETTINGS.items():
        if setting.help and setting.flag is None:
            assert f"{setting.listed or variable_of(name)}={setting.value} " in text, name
    for name in (*PASSED_ON, *variables.WITHOUT_EFFECT):
        assert name in text, name
    shown = {
        name for word in re.findall(r"\b[A-Z](?:[A-Za-z0-9_]|{[A-Z_,]*})+", text) for name in variables.expand(word)
    }
    assert set(ALL) - shown == set()
    assert max(map(len, done.stdout.splitlines())) <= 110


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_of_gaudi_elsewhere(device: str) -> None:
    notes = read(
        "--device",
        device,
        ENABLE_HPU_GRAPH="true",
        USE_FLASH_ATTENTION="true",
        BATCH_BUCKET_SIZE="8",
        WARMUP_ENABLED="1",
    ).notes
    shown = {"cpu": "CPU", "cuda": "GPU"}[device]
    assert notes == [
        f"ENABLE_HPU_GRAPH has no effect: it is about Gaudi, and the model runs on the {shown}",
        "USE_FLASH_ATTENTION has no effect: the device has one kind of attention",
        "BATCH_BUCKET_SIZE has no effect: batches are not padded; --bucketing true pads them",
    ]
    assert read("--device", device, "--bucketing", "true", BATCH_BUCKET_SIZE="8").notes == []


@pytest.mark.parametrize("installed", [False, True])
def test_attention_on_a_gpu(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    [other] = read("--device", "cuda", ATTENTION="paged").notes
    assert "ATTENTION=flashinfer" in other
    notes = read("--device", "cuda", ATTENTION="flashinfer").notes
    if installed:
        assert notes == []
    else:
        assert len(notes) == 1
        assert "pip install flashinfer-python" in notes[0]
    assert "one kind" in read("--device", "cpu", ATTENTION="flashinfer").notes[0]


def test_settings_on_gaudi() -> None:
    def notes(**environment: str) -> list[str]:
        return read("--device", "hpu", **environment).notes

    everything = {"ENABLE_HPU_GRAPH": "true", "LIMIT_HPU_GRAPH": "true", "USE_FLASH_ATTENTION": "true"}
    sizes = {"BATCH_BUCKET_SIZE": "8", "PREFILL_BATCH_BUCKET_SIZE": "4", "PAD_SEQUENCE_TO_MULTIPLE_OF": "128"}
    image = {"PREFIX_CACHING": "0", "FLASH_ATTENTION_RECOMPUTE": "true"}
    assert notes(**everything, **sizes, **image) == []
    assert notes(PREFIX_CACHING="1", PREFILL_CHUNKING="1") == []
    assert notes(PREFILL_CHUNKING="0") == ["PREFILL_CHUNKING has no effect: long prompts are always computed in parts"]
    assert notes(PT_HPU_LAZY_MODE="0", ENABLE_HPU_GRAPH="true") == [
        "ENABLE_HPU_GRAPH has no effect: PT_HPU_LAZY_MODE=0 compiles steps instead of capturing graphs"
    ]
    for mode in "10":
        assert notes(PT_HPU_LAZY_MODE=mode, ENABLE_HPU_GRAPH="false", LIMIT_HPU_GRAPH="true") == [
            "LIMIT_HPU_GRAPH has no effect: ENABLE_HPU_GRAPH=false captures no graphs"
        ]
    assert notes(USE_FLASH_ATTENTION="false", FLASH_ATTENTION_RECOMPUTE="true") == [
        "FLASH_ATTENTION_RECOMPUTE has no effect: USE_FLASH_ATTENTION=false turns it off"
    ]
    assert notes(VLLM_EXPONENTIAL_BUCKETING="true", BATCH_BUCKET_SIZE="8", VLLM_DECODE_BLOCK_BUCKET_STEP="64") == [
        "BATCH_BUCKET_SIZE has no effect: the strategy is exponential"
    ]
    assert notes(BATCH_BUCKET_SIZE="8", VLLM_DECODE_BS_BUCKET_LIMIT="4") == [
        "VLLM_DECODE_BS_BUCKET_LIMIT has no effect: the strategy is linear"
    ]
    none = "has no effect: no profile is taken at start; PROF_STEP=N takes one"
    assert notes(PROF_PATH="/p", PROF_WAITSTEP="3") == [f"PROF_WAITSTEP {none}", f"PROF_PATH {none}"]
    assert notes(PROF_WAITSTEP="3", PROF_STEP="2") == []
    # An administrator may ask for one, with these settings.
    key = {"ADMIN_API_KEY": "secret"}
    assert notes(PROF_PATH="/p", PROF_RECORD_SHAPES="true", **key) == []
    assert notes(PROF_STEP="3", PROF_RANKS="1,2", PROF_PATH="/p", **key) == [
        f"{name} has no effect: PROF_RANKS names no rank that there is: 0" for name in ("PROF_STEP", "PROF_RANKS")
    ]
    assert notes(CUDA_MEMORY_FRACTION="0.5") == ["--cuda-memory-fraction has no effect: use HPU_MEMORY_FRACTION"]
    assert notes(TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN="True") == [
        "TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN has no effect: only the text true, as it is here, counts"
    ]


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (
            {"WARMUP_ENABLED": "true", "VLLM_SKIP_WARMUP": "true"},
            "WARMUP_ENABLED=true and VLLM_SKIP_WARMUP=true exclude each other: leave one out",
        ),
        (
            {"BUCKETING": "false"},
            "`bucketing` is false, but on Gaudi each new shape is compiled while requests wait: leave it out, or choose"
            " larger sizes with BATCH_BUCKET_SIZE and PAD_SEQUENCE_TO_MULTIPLE_OF",
        ),
        (
            {"VLLM_EXPONENTIAL_BUCKETING": "true", "VLLM_BUCKETING_STRATEGY": "lin"},
            "`bucket_strategy` is linear, but VLLM_EXPONENTIAL_BUCKETING says exponential: leave one out",
        ),
        (
            {"QUANT_CONFIG": "q.json", "QUANTIZE": "fp8"},
            "`quant_config` and `quantize` both say how matrices are stored: leave one out (QUANT_CONFIG quantises with"
            " measured scales, --quantize fp8 with those of the weights)",
        ),
        (
            {"VLLM_DECODE_BS_BUCKET_MIN": "9", "VLLM_DECODE_BS_BUCKET_MAX": "8"},
            "`vllm_decode_bs_bucket_min` must be <= `vllm_decode_bs_bucket_max`. Given: 9 and 8",
        ),
        ({"BATCH_BUCKET_SIZE": "0"}, "`batch_bucket_size` must be > 0"),
        ({"PAD_SEQUENCE_TO_MULTIPLE_OF": "-1"}, "`pad_sequence_to_multiple_of` must be >= 0. Given: -1"),
        ({"QUEUE_THRESHOLD_MS": "-1"}, "`queue_threshold_ms` must be >= 0. Given: -1"),
        ({"HPU_MEMORY_FRACTION": "1.5"}, "`hpu_memory_fraction` must be > 0 and <= 1. Given: 1.5"),
        ({"TGI_GRAPH_RESERVED_MEM": "1"}, "`tgi_graph_reserved_mem` must be >= 0 and < 1. Given: 1.0"),
        ({"VLLM_BUCKETING_STRATEGY": "pad"}, "`bucket_strategy` must be one of linear, exponential. Given: pad"),
        ({"PROF_STEP": "-2"}, "`prof_step` must be >= 0. Given: -2"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(environment: dict[str, str], error: str) -> None:
    assert error_of("--device", "hpu", **environment) == f"Invalid argument: {error}"


def test_two_names_of_one_variable() -> None:
    assert read(LIMIT_HPU_GRAPH="true", LIMIT_HPU_GRAPHS="true").config.limit_hpu_graph is True
    assert error_of(LIMIT_HPU_GRAPH="true", LIMIT_HPU_GRAPHS="false") == (
        "LIMIT_HPU_GRAPHS='false' and LIMIT_HPU_GRAPH='true' mean the same setting: leave one out"
    )
    # A flag beats both names.
    assert read("--bucketing", "false", VLLM_ENABLE_BUCKETING="true", BUCKETING="true").config.bucketing is False


def test_text_that_is_no_value_is_not_taken_for_false() -> None:
    assert error_of(ENABLE_HPU_GRAPH="ture") == (
        "environment variable ENABLE_HPU_GRAPH='ture' is not valid: it must be true or false"
    )
    assert "QUEUE_THRESHOLD_MS='soon' is not valid" in error_of(QUEUE_THRESHOLD_MS="soon")


def test_strategy() -> None:
    assert choose_strategy(ServerConfig()) == "exponential"
    for name in ("batch_bucket_size", "prefill_batch_bucket_size", "pad_sequence_to_multiple_of"):
        assert choose_strategy(ServerConfig(**{name: 8})) == "linear"
    assert choose_strategy(ServerConfig(batch_bucket_size=8, vllm_exponential_bucketing=True)) == "exponential"
    assert choose_strategy(ServerConfig(vllm_exponential_bucketing=False)) == "linear"
    assert choose_strategy(ServerConfig(bucket_strategy="linear")) == "linear"


def test_environment_of_the_engine() -> None:
    outer = {"UPDATE_GRAPH_OUTPUT_MME": "true", "PT_HPU_LAZY_MODE": "0", "API_KEY": "a", "ADMIN_API_KEY": "b"}
    child = child_environment(ServerConfig(), outer)
    assert child["PT_HPU_LAZY_MODE"] == "0" and child["UPDATE_GRAPH_OUTPUT_MME"] == "true"  # for Gaudi's software
    assert not {"API_KEY", "ADMIN_API_KEY"} & child.keys()


def test_lazy_mode_is_the_default_of_processes() -> None:
    """Newer releases of Gaudi's software are eager unless they are told otherwise, before torch is imported."""
    assert child_environment(ServerConfig(device="hpu"), {})["PT_HPU_LAZY_MODE"] == "1"
    asked = ServerConfig(device="hpu", pt_hpu_lazy_mode=False)
    assert child_environment(asked, {"PT_HPU_LAZY_MODE": "1"})["PT_HPU_LAZY_MODE"] == "0"
    assert "PT_HPU_LAZY_MODE" not in child_environment(ServerConfig(device="cpu"), {})


def test_what_else_the_software_reads_as_it_is_loaded() -> None:
    plain = child_environment(ServerConfig(device="hpu"), {})
    assert not {"ENABLE_EXPERIMENTAL_FLAGS", "PT_HPU_ENABLE_LAZY_COLLECTIVES"} & plain.keys()
    outer = {"UPDATE_GRAPH_OUTPUT_MME": "true"}
    child = child_environment(ServerConfig(device="hpu", quantize="fp8", num_shard=2), outer)
    assert child["ENABLE_EXPERIMENTAL_FLAGS"] == child["UPDATE_GRAPH_OUTPUT_MME"] == "true"
    assert child["PT_HPU_ENABLE_LAZY_COLLECTIVES"] == "1"


BEFORE_TORCH = {
    "tgi generate": "text_generation_inference.cli generate --device hpu hello",
    "tgi check": "text_generation_inference.cli check --device hpu embedded",
    "tgi bench offline": "text_generation_inference.cli bench offline --device hpu --use_hpu_graphs",
    "tgi bench offline, eager": "text_generation_inference.cli bench offline --device hpu --torch_compile",
    "static batches": "text_generation_inference.bench.static.command --tokenizer-name embedded --device hpu",
    "measure": "text_generation_inference.launch.server_command measure --device hpu --quant-config x --text x",
    "quantize": "text_generation_inference.launch.server_command quantize --device hpu embedded out",
}


@pytest.mark.parametrize("name", BEFORE_TORCH)
def test_commands_say_the_mode_before_torch_is_imported(tmp_path: Path, name: str) -> None:
    tell = "import os; print(os.environ.get('PT_HPU_LAZY_MODE'), os.environ.get('ENABLE_EXPERIMENTAL_FLAGS'))"
    (tmp_path / "torch.py").write_text(f"{tell}\nos._exit(os.sys.stdout.flush() or 0)\n")
    kept = {key: value for key, value in os.environ.items() if key != "PT_HPU_LAZY_MODE"}
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", *BEFORE_TORCH[name].split()],
        env={**kept, "PYTHONPATH": paths, "QUANT_CONFIG": "x" if name == "measure" else ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    mode = "0" if "eager" in name else "1"
    assert done.stdout.splitlines()[-1:] == [f"{mode} {'true' if name == 'measure' else None}"], (
        done.stdout + done.stderr
    )
