"""The published command lines for Gaudi, of three releases, as they are, and what of ours computes their models.

A model that a page names without a line of its own has the page's form for any model.

What `docker run` is told itself (`--runtime`, `-p`, `-v`) is left out; `-e` is the environment; what the image sets is
added.
"""

from typing import NamedTuple

from text_generation_inference.launch.arguments import Launch, build_parser, read_arguments

# What docker/gaudi.Dockerfile sets.
IMAGE = {
    "TGI_DEVICE": "hpu",
    "PORT": "80",
    "HF_HOME": "/data",
    "PT_HPU_LAZY_MODE": "1",
    "PT_HPU_WEIGHT_SHARING": "0",
    "HABANA_VISIBLE_DEVICES": "all",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}
LLAMA2_7B, LLAMA2_70B = "meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-70b-chat-hf"
LLAMA31_8B, LLAMA31_70B = "meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-70B-Instruct"
LLAMA33_70B, LLAVA = "meta-llama/Llama-3.3-70B-Instruct", "llava-hf/llava-v1.6-mistral-7b-hf"
LLAMA3_70B, README_8B = "meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
MISTRAL, MIXTRAL = "mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mixtral-8x7B-Instruct-v0.1"
CODE_LLAMA, GEMMA = "codellama/CodeLlama-13b-hf", "google/gemma-7b-it"
STARCODER, STARCODER2 = "bigcode/starcoder", ("bigcode/starcoder2-15b", "bigcode/starcoder2-3b")
FALCON_180B, QWEN2_72B = "tiiuae/falcon-180B-chat", "Qwen/Qwen2-72B-Instruct"
IDEFICS = "HuggingFaceM4/idefics-9b"  # refused, with the reason

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

# What of ours computes each: a kind of `tests/devices/gaudi_models.py`.
KINDS = {
    **dict.fromkeys((LLAMA2_7B, LLAMA2_70B, LLAMA3_70B, LLAMA31_8B, LLAMA31_70B, LLAMA33_70B), "Llama"),
    **dict.fromkeys(("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf", README_8B, CODE_LLAMA), "Llama"),
    MISTRAL: "Mistral",
    MIXTRAL: "Mixtral",
    FALCON_180B: "Falcon",
    "tiiuae/falcon-7b-instruct": "FalconMultiQuery",
    **dict.fromkeys((QWEN2_72B, "Qwen/Qwen2-7B-Instruct"), "Qwen2"),
    STARCODER: "GPTBigCode",
    **dict.fromkeys(STARCODER2, "Starcoder2"),
    GEMMA: "Gemma",
    **dict.fromkeys(("microsoft/phi-2", "microsoft/phi-1_5"), "Phi"),
    "deepseek-ai/DeepSeek-V2-Lite": "DeepseekV2",
    "facebook/opt-125m": "OPT",
    "openai-community/gpt2": "GPT2LMHeadModel",
    "EleutherAI/gpt-j-6b": "GPTJ",
    LLAVA: "llava_next",
    "meta-llama/Llama-3.2-11B-Vision-Instruct": "mllama",
    IDEFICS: "idefics",
    "HuggingFaceM4/idefics2-8b": "idefics2",
    "HuggingFaceM4/Idefics3-8B-Llama3": "idefics3",
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2_vl",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
}
# Those that know fewer positions than the lines would give them.
POSITIONS = {
    **dict.fromkeys((FALCON_180B, "tiiuae/falcon-7b-instruct", "microsoft/phi-2", "microsoft/phi-1_5"), 2048),
    **dict.fromkeys(("facebook/opt-125m", "EleutherAI/gpt-j-6b"), 2048),
    "openai-community/gpt2": 1024,
}
# On 3.2's pages: named with both precisions; named alone; too large for one card; on one card and on several.
VALIDATED = [
    *(LLAMA33_70B, LLAMA3_70B, CODE_LLAMA, MISTRAL, MIXTRAL, FALCON_180B, QWEN2_72B, STARCODER, *STARCODER2, GEMMA),
    *("microsoft/phi-2", "deepseek-ai/DeepSeek-V2-Lite"),
]
LONG = (LLAMA2_7B, LLAMA2_70B, LLAMA31_8B, LLAMA31_70B, LLAVA)  # those with long command lines
NAMED = [model for model in KINDS if not model.startswith("meta-llama/Llama-2-") and model not in (*LONG, *VALIDATED)]
NAMED.remove(README_8B)
MANY_CARDS = (LLAMA33_70B, LLAMA3_70B, FALCON_180B, QWEN2_72B)
BOTH = [LLAMA2_7B, LLAMA31_8B, CODE_LLAMA, MISTRAL, MIXTRAL, STARCODER, *STARCODER2, GEMMA, LLAVA]


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
    # the README of release 3.2's sources
    **{
        f"3.2 readme {name}": Command(
            README_8B,
            f"LOG_LEVEL=debug {TOKEN}",
            f"{cards}--max-input-tokens 512 --max-total-tokens 1024 --max-batch-size {batch}"
            " --max-batch-prefill-tokens 2048",
            (512, 1024, batch, 2048),
        )
        for name, cards, batch in (("eight cards", f"{SHARDED} ", 8), ("one card", "", 4))
    },
    # release 3.2: the models that its pages name without a line, in the form that the pages give for any model
    **{
        f"3.2 {model} {precision}": Command(
            model, f"{quantised}{TOKEN}", SHARDED if model in MANY_CARDS else "", (4095, 4096, 32, 4096)
        )
        for model in (*VALIDATED, *NAMED)
        for precision, quantised in (("bf16", ""), ("fp8", f"{FP8} "))
        if model in VALIDATED or not quantised
    },
    # those that the pages name for several cards as well; Starcoder 2 in bfloat16 alone
    **{
        f"3.2 {model} {precision} eight cards": Command(model, f"{quantised}{TOKEN}", SHARDED, (4095, 4096, 32, 4096))
        for model in BOTH
        for precision, quantised in (("bf16", ""), ("fp8", f"{FP8} "))
        if not (quantised and model in (*STARCODER2, LLAVA)) and (quantised or model != LLAMA31_8B)
    },
    # release 3.3: exponential shapes
    "3.3 benchmark": Command(
        LLAMA31_8B,
        f"{TOKEN} VLLM_EXPONENTIAL_BUCKETING=true ATTENTION=paged",
        "--max-input-tokens 512 --max-total-tokens 1536 --max-batch-size 256 --max-batch-prefill-tokens 131072"
        " --max-concurrent-requests 512",
        (512, 1536, 256, 131072),
    ),
}


class Spawned(NamedTuple):
    """A line of gaudi_spawn: FP8 with measured scales of Llama 2 70B, through `tgi bench offline`."""

    cards: int
    inputs: int
    outputs: int
    batch: int
    more: tuple[str, ...] = ("--disk_offload",)

    def words(self, model: str, inputs: int, outputs: int, batch: int) -> list[str]:
        """With another model, lengths and batch than published."""
        flags = ["--attn_softmax_bf16", "--use_hpu_graphs", "--trim_logits", "--use_kv_cache", "--limit_hpu_graphs"]
        flags += ["--bucket_size=128", "--bucket_internal"]
        sizes = [
            "--max_new_tokens",
            str(outputs),
            "--max_input_tokens",
            str(inputs),
            "--bf16",
            "--batch_size",
            str(batch),
        ]
        return [
            *("--use_deepspeed", "--world_size", str(self.cards), "--model_name_or_path", model),
            *(*flags, *sizes, *self.more, "--use_flash_attention", "--flash_attention_recompute"),
        ]


SPAWNED = (
    Spawned(2, 128, 128, 1750),
    Spawned(4, 128, 2048, 750, ()),
    Spawned(2, 2048, 128, 95),
    Spawned(2, 2048, 2048, 78),
)


def launch(command: Command) -> Launch:
    environment = dict(item.split("=", 1) for item in command.environment.split())
    arguments = [*(["--model-id", command.model] if command.model else []), *command.arguments.split()]
    # The default argument of the image is replaced by these, as by any that are given.
    return read_arguments(build_parser("launcher", "").parse_args(arguments), {**IMAGE, **environment})
