"""The published command lines for Gaudi, of three releases, are accepted as they are, the model aside.

What `docker run` is told itself (`--runtime`, `-p`, `-v`) is left out; `-e` is the environment; what the image sets is
added. The limits that follow are those the command asks for.
"""

from typing import NamedTuple

import pytest

from text_generation_inference.config import ModelSize, ServerConfig, choose_strategy, resolve
from text_generation_inference.launch.arguments import Launch, build_parser, read_arguments
from text_generation_inference.types import Limits

# What docker/gaudi.Dockerfile sets.
IMAGE = {
    "TGI_DEVICE": "hpu",
    "PORT": "80",
    "HF_HOME": "/data",
    "PREFIX_CACHING": "0",
    "PREFILL_CHUNKING": "0",
    "PT_HPU_LAZY_MODE": "1",
    "PT_HPU_WEIGHT_SHARING": "0",
    "HABANA_VISIBLE_DEVICES": "all",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
LLAMA2_7B, LLAMA2_70B = "meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-70b-chat-hf"
LLAMA31_8B, LLAMA31_70B = "meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-70B-Instruct"
LLAVA = "llava-hf/llava-v1.6-mistral-7b-hf"

FP8 = "QUANT_CONFIG=./quantization_config/maxabs_quant.json"
TOKEN = "HF_TOKEN=hf_abc"
A_TOKEN = "HUGGING_FACE_HUB_TOKEN=hf_abc"
A_CARDS = "HABANA_VISIBLE_DEVICES=all OMPI_MCA_btl_vader_single_copy_mechanism=none"
A_GRAPHS = "ENABLE_HPU_GRAPH=true LIMIT_HPU_GRAPH=true USE_FLASH_ATTENTION=true FLASH_ATTENTION_RECOMPUTE=true"
A_BENCH = f"{A_CARDS} TEXT_GENERATION_SERVER_IGNORE_EOS_TOKEN=true {A_GRAPHS}"
LAZY = "PT_HPU_ENABLE_LAZY_COLLECTIVES=true"
SMALL = "MAX_TOTAL_TOKENS=2048 PREFILL_BATCH_BUCKET_SIZE=2 BATCH_BUCKET_SIZE=32 PAD_SEQUENCE_TO_MULTIPLE_OF=256"
LARGE = "MAX_TOTAL_TOKENS=2048 BATCH_BUCKET_SIZE=256 PREFILL_BATCH_BUCKET_SIZE=4 PAD_SEQUENCE_TO_MULTIPLE_OF=64"
IMAGES = "PREFILL_BATCH_BUCKET_SIZE=1 BATCH_BUCKET_SIZE=1"
WAITING = "--max-waiting-tokens 7 --waiting-served-ratio 1.2 --max-concurrent-requests"
SHARDED = "--sharded true --num-shard 8"
A_SMALL = f"--max-input-length 1024 --max-total-tokens 2048 --max-batch-prefill-tokens 2048 --max-batch-total-tokens 65536 {WAITING} 64"
A_LARGE = f"{SHARDED} --max-input-length 1024 --max-total-tokens 2048 --max-batch-prefill-tokens 4096 --max-batch-total-tokens 524288 {WAITING} 512"
A_IMAGES = (
    "--max-input-tokens 4096 --max-batch-prefill-tokens 16384 --max-total-tokens 8192 --max-batch-total-tokens 32768"
)
B_SMALL = (
    f"--max-input-tokens 1024 --max-total-tokens 2048 --max-batch-prefill-tokens 2048 --max-batch-size 32 {WAITING} 64"
)
B_LARGE = f"{SHARDED} --max-input-tokens 1024 --max-total-tokens 2048 --max-batch-prefill-tokens 4096 --max-batch-size 256 {WAITING} 512"
B_IMAGES = "--max-input-tokens 4096 --max-batch-prefill-tokens 16384 --max-total-tokens 8192 --max-batch-size 4"
OLD_SMALL = f"{A_CARDS} HF_HUB_ENABLE_HF_TRANSFER=1 PREFILL_BATCH_BUCKET_SIZE=1 PAD_SEQUENCE_TO_MULTIPLE_OF=128"
OLD_LIMITS = "--max-input-tokens 1024 --max-total-tokens 2048"


class Command(NamedTuple):
    model: str  # empty: the published line names none
    environment: str
    arguments: str
    limits: tuple[int, int, int, int]  # input, total, batch, prompt tokens of a step
    sizes: tuple[int | None, int | None, int | None] = (None, None, None)  # decode batch, prompt batch, length


SMALL_SIZES, LARGE_SIZES, IMAGE_SIZES = (32, 2, 256), (256, 4, 64), (1, 1, None)
SMALL_LIMITS, LARGE_LIMITS, IMAGE_LIMITS = (1024, 2048, 32, 2048), (1024, 2048, 256, 4096), (4096, 8192, 4, 16384)
START = (1024, 2048, 32, 4096)  # the batch and the prompt tokens of a step are the device's

COMMANDS: dict[str, Command] = {
    # release 2.0.4
    "2.0.4 first start": Command("meta-llama/Llama-2-7b-hf", f"{A_CARDS} {A_TOKEN} {A_GRAPHS}", OLD_LIMITS, START),
    "2.0.4 eager": Command("meta-llama/Llama-2-7b-hf", f"{A_CARDS} PT_HPU_LAZY_MODE=0 {A_TOKEN}", OLD_LIMITS, START),
    "2.0.4 eight cards": Command(
        "meta-llama/Llama-2-70b-hf", f"{LAZY} {A_CARDS} {A_TOKEN} {A_GRAPHS}", f"{SHARDED} {OLD_LIMITS}", START
    ),
    **{
        f"2.0.4 {model} {precision}": Command(
            model, f"{quantised}{A_BENCH} {A_TOKEN} {environment}", arguments, limits, sizes
        )
        for precision, quantised in (("bf16", ""), ("fp8", f"{FP8} "))
        for model, environment, arguments, limits, sizes in (
            (LLAMA2_7B, SMALL, A_SMALL, SMALL_LIMITS, SMALL_SIZES),
            (LLAMA2_70B, f"{LAZY} {LARGE}", A_LARGE, LARGE_LIMITS, LARGE_SIZES),
            (LLAMA31_8B, SMALL, A_SMALL, SMALL_LIMITS, SMALL_SIZES),
            (LLAMA31_70B, f"{LAZY} {LARGE}", A_LARGE, LARGE_LIMITS, LARGE_SIZES),
            (LLAVA, f"{LAZY} HF_HUB_ENABLE_HF_TRANSFER=1 {IMAGES}", A_IMAGES, IMAGE_LIMITS, IMAGE_SIZES),
        )
    },
    "2.0.4 llava fp8 eight cards": Command(
        LLAVA,
        f"{FP8} {A_BENCH} {LAZY} HF_HUB_ENABLE_HF_TRANSFER=1 {IMAGES}",
        f"{SHARDED} {A_IMAGES}",
        IMAGE_LIMITS,
        IMAGE_SIZES,
    ),
    # The seed's lines for eight cards name no model.
    "2.0.4 no model": Command("", f"{A_BENCH} {LAZY} {LARGE}", A_LARGE, LARGE_LIMITS, LARGE_SIZES),
    "2.0.4 hqt": Command(LLAMA2_7B, f"{FP8} USE_INC=0 {A_BENCH} {SMALL}", A_SMALL, SMALL_LIMITS, SMALL_SIZES),
    # release 2.0.1
    "2.0.1 7b bf16": Command(
        LLAMA2_7B,
        f"{OLD_SMALL} BATCH_BUCKET_SIZE=16",
        f"{OLD_LIMITS} --max-batch-prefill-tokens 4096 --max-batch-size 16",
        (1024, 2048, 16, 4096),
        (16, 1, 128),
    ),
    "2.0.1 7b fp8": Command(
        LLAMA2_7B,
        f"{OLD_SMALL} BATCH_BUCKET_SIZE=64 {FP8}",
        f"{OLD_LIMITS} --max-batch-prefill-tokens 4096 --max-batch-size 64",
        (1024, 2048, 64, 4096),
        (64, 1, 128),
    ),
    "2.0.1 70b bf16": Command(
        LLAMA2_70B,
        f"{OLD_SMALL} {LAZY} BATCH_BUCKET_SIZE=256",
        f"{OLD_LIMITS} --max-batch-prefill-tokens 16384 --max-batch-size 256 --max-concurrent-requests 400 {SHARDED}",
        (1024, 2048, 256, 16384),
        (256, 1, 128),
    ),
    "2.0.1 70b fp8": Command(
        LLAMA2_70B,
        f"{OLD_SMALL} {LAZY} BATCH_BUCKET_SIZE=512 {FP8}",
        f"{OLD_LIMITS} --max-batch-prefill-tokens 16384 --max-batch-size 512 --max-concurrent-requests 700 {SHARDED}",
        (1024, 2048, 512, 16384),
        (512, 1, 128),
    ),
    "2.0.1 llava": Command(
        LLAVA,
        A_CARDS,
        "--max-input-tokens 4096 --max-batch-prefill-tokens 16384 --max-total-tokens 8192",
        (4096, 8192, 32, 16384),
    ),
    # release 3.2
    "3.2 first start": Command(LLAMA31_8B, TOKEN, "", (4095, 4096, 32, 4096)),
    "3.2 eight cards": Command(LLAMA31_8B, TOKEN, SHARDED, (4095, 4096, 32, 4096)),
    "3.2 profile": Command(
        LLAMA31_8B,
        f"{TOKEN} PROF_WAITSTEP=10 PROF_WARMUPSTEP=10 PROF_STEP=1 PROF_PATH=/tmp/hpu_profile PROF_RANKS=0"
        " PROF_RECORD_SHAPES=True",
        "",
        (4095, 4096, 32, 4096),
    ),
    **{
        f"3.2 {model} {precision}": Command(model, f"{quantised}{environment}", arguments, limits, sizes)
        for precision, quantised in (("bf16", ""), ("fp8", f"{FP8} "))
        for model, environment, arguments, limits, sizes in (
            (LLAMA31_8B, f"{TOKEN} {SMALL}", B_SMALL, SMALL_LIMITS, SMALL_SIZES),
            (LLAMA31_70B, f"{TOKEN} {LARGE}", B_LARGE, LARGE_LIMITS, LARGE_SIZES),
            (LLAMA2_7B, f"{TOKEN} {SMALL}", B_SMALL, SMALL_LIMITS, SMALL_SIZES),
            (LLAMA2_70B, f"{TOKEN} {LARGE}", B_LARGE, LARGE_LIMITS, LARGE_SIZES),
            (LLAVA, IMAGES, B_IMAGES, IMAGE_LIMITS, IMAGE_SIZES),
        )
    },
    "3.2 llava fp8 eight cards": Command(LLAVA, f"{FP8} {IMAGES}", f"{SHARDED} {B_IMAGES}", IMAGE_LIMITS, IMAGE_SIZES),
    # release 3.3: exponential shapes
    "3.3 benchmark": Command(
        LLAMA31_8B,
        f"{TOKEN} VLLM_EXPONENTIAL_BUCKETING=true ATTENTION=paged",
        "--max-input-tokens 512 --max-total-tokens 1536 --max-batch-size 256 --max-batch-prefill-tokens 131072"
        " --max-concurrent-requests 512",
        (512, 1536, 256, 131072),
    ),
}
HPU = Limits(
    block_size=128,
    dtypes=["bfloat16", "float32"],
    buckets=True,
    max_batch_size=32,
    max_batch_prefill_tokens=4096,
    memory_share=0.9,
)


def launch(command: Command) -> Launch:
    environment = dict(item.split("=", 1) for item in command.environment.split())
    arguments = [*(["--model-id", command.model] if command.model else []), *command.arguments.split()]
    # The default argument of the image is replaced by these, as by any that are given.
    return read_arguments(build_parser("launcher", "").parse_args(arguments), {**IMAGE, **environment})


@pytest.mark.parametrize("name", COMMANDS)
def test_published_command(name: str) -> None:
    command = COMMANDS[name]
    config = launch(command).config
    assert config.model_id == (command.model or ServerConfig().model_id)
    num_shard = 8 if SHARDED in command.arguments else 1
    assert (config.device, config.port, config.num_shard) == ("hpu", 80, num_shard)
    assert (
        config.batch_bucket_size,
        config.prefill_batch_bucket_size,
        config.pad_sequence_to_multiple_of,
    ) == command.sizes
    assert config.quant_config == ("./quantization_config/maxabs_quant.json" if FP8 in command.environment else None)
    assert config.ignore_eos_token == ("IGNORE_EOS" in command.environment)
    assert (config.pt_hpu_lazy_mode is False) == ("LAZY_MODE=0" in command.environment)
    assert choose_strategy(config) == ("linear" if any(command.sizes) else "exponential")


@pytest.mark.parametrize("name", COMMANDS)
def test_limits_that_follow(name: str) -> None:
    command = COMMANDS[name]
    size = ModelSize(max_positions=131072, kv_bytes_per_token=131072)
    found = resolve(launch(command).config, size, HPU, free_bytes=80_000_000_000)
    assert (
        found.max_input_tokens,
        found.max_total_tokens,
        found.max_batch_size,
        found.max_batch_prefill_tokens,
    ) == command.limits
    assert found.max_batch_prefill_tokens >= found.max_input_tokens


@pytest.mark.parametrize("name", COMMANDS)
def test_only_what_is_worth_a_word_is_told(name: str) -> None:
    """Nothing that is published for Gaudi surprises there, but for switches without effect."""
    command = COMMANDS[name]
    expected = []
    if "ATTENTION=paged" in command.environment:
        expected.append("ATTENTION has no effect: the device has one kind of attention")
    if "HF_TRANSFER" in command.environment:
        expected.append("HF_HUB_ENABLE_HF_TRANSFER has no effect: the hub's library chooses the fastest way itself")
    if "USE_INC" in command.environment:
        expected.append("USE_INC has no effect: the forms of both toolkits are read alike")
    assert launch(command).notes == expected


def test_every_validated_model_is_there() -> None:
    models = {command.model for command in COMMANDS.values()}
    assert {LLAMA2_7B, LLAMA2_70B, LLAMA31_8B, LLAMA31_70B, LLAVA} <= models
    assert len(COMMANDS) == 36
