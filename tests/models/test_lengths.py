"""How long sequences may be: what a model was made for, which is not `max_position_embeddings` in every file."""

from pathlib import Path
from typing import Any

import pytest
from driving import make_request, make_tiny, random_prompts, reference, run, start

from text_generation_inference.models.config import Config
from text_generation_inference.models.registry import build

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LENGTHS: dict[str, tuple[str, dict[str, Any], int]] = {  # as files have them
    "Qwen2.5 as its guide stretches it": (
        "Qwen2ForCausalLM",
        {"max_position_embeddings": 32768, "rope_scaling": {**YARN, "type": "yarn", "rope_type": None}},
        131072,
    ),
    "Qwen3 as its guide stretches it": (
        "Qwen3ForCausalLM",
        {"max_position_embeddings": 40960, "rope_scaling": YARN},
        131072,
    ),
    "GPT-OSS, which says the same twice": ("GptOssForCausalLM", {}, 131072),
    "longer than stretched": ("Qwen2ForCausalLM", {"max_position_embeddings": 200000, "rope_scaling": YARN}, 200000),
    "stretched from what is not said": (
        "LlamaForCausalLM",
        {"max_position_embeddings": 131072, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        131072,
    ),
    "Vicuna-16k": (
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 4096,
            "max_sequence_length": 16384,
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        16384,
    ),
    "nothing stretched": ("LlamaForCausalLM", {"max_position_embeddings": 4096, "max_sequence_length": 16384}, 4096),
    "DeepSeek-Coder, stretched already": (
        "LlamaForCausalLM",
        {"max_position_embeddings": 16384, "rope_scaling": {"type": "linear", "factor": 4.0}},
        16384,
    ),
    "Command R": ("CohereForCausalLM", {"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
    "Aya 23": ("CohereForCausalLM", {"max_position_embeddings": 8192}, 8192),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_length(case: str) -> None:
    architecture, fields, length = LENGTHS[case]
    assert build(Config({**fields, "architectures": [architecture]}, "config.json")).max_positions == length


def test_tokens_behind_the_original_length(tmp_path: Path) -> None:
    """YaRN's table does not depend on how long sequences are: tokens are those of `transformers` on both sides."""
    rope = {**YARN, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    tiny = make_tiny("Qwen2", {"max_position_embeddings": 32, "rope_parameters": rope}, tmp_path)
    prompts = random_prompts(320, [20, 100], seed=6)
    engine = start(tiny.folder)
    assert engine.facts.max_total_tokens == 128
    found = run(engine, [make_request(number, prompt, 16) for number, prompt in enumerate(prompts)])
    engine.close()
    assert [output.token_ids for output in found] == [reference(tiny.model, prompt, 16)[0] for prompt in prompts]
